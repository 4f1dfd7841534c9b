"""GGUF files of Qwen2, Phi-3 and Gemma 2 give the config and the weights of their checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from models.config import ModelConfig
from models.errors import ModelLoadError
from models.loading.checkpoint import CheckpointLoader
from models.loading.gguf import GgufFile
from models.weight_layout import WeightStore
from tests.models.tiny_models import make_layout, one_device

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCAB = 2, 4, 2, 16, 32, 24, 40
ROWS, KEY_ROWS = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM

Names = dict[str, tuple[str, tuple[int, ...]]]

PARTS: Names = {
    "attn_q.weight": ("self_attn.q_proj.weight", (ROWS, HIDDEN)),
    "attn_k.weight": ("self_attn.k_proj.weight", (KEY_ROWS, HIDDEN)),
    "attn_v.weight": ("self_attn.v_proj.weight", (KEY_ROWS, HIDDEN)),
    "ffn_gate.weight": ("mlp.gate_proj.weight", (INNER, HIDDEN)),
    "ffn_up.weight": ("mlp.up_proj.weight", (INNER, HIDDEN)),
}
FUSED: Names = {
    "attn_qkv.weight": ("self_attn.qkv_proj.weight", (ROWS + 2 * KEY_ROWS, HIDDEN)),
    "ffn_up.weight": ("mlp.gate_up_proj.weight", (2 * INNER, HIDDEN)),
}
AFTER: Names = {
    "attn_output.weight": ("self_attn.o_proj.weight", (HIDDEN, ROWS)),
    "ffn_down.weight": ("mlp.down_proj.weight", (HIDDEN, INNER)),
    "attn_norm.weight": ("input_layernorm.weight", (HIDDEN,)),
}
NORM: Names = {"ffn_norm.weight": ("post_attention_layernorm.weight", (HIDDEN,))}
BIASES: Names = {
    "attn_q.bias": ("self_attn.q_proj.bias", (ROWS,)),
    "attn_k.bias": ("self_attn.k_proj.bias", (KEY_ROWS,)),
    "attn_v.bias": ("self_attn.v_proj.bias", (KEY_ROWS,)),
}
GEMMA_NORMS: Names = {
    "post_attention_norm.weight": ("post_attention_layernorm.weight", (HIDDEN,)),
    "ffn_norm.weight": ("pre_feedforward_layernorm.weight", (HIDDEN,)),
    "post_ffw_norm.weight": ("post_feedforward_layernorm.weight", (HIDDEN,)),
}
LAYER = {
    "qwen2": PARTS | AFTER | NORM | BIASES,
    "phi3": FUSED | AFTER | NORM,
    "gemma2": PARTS | AFTER | GEMMA_NORMS,
}
"""Names within a layer, from llama.cpp's own table: GGUF -> (Hugging Face, shape)."""


def checkpoint(architecture: str) -> dict[str, tuple[str, np.ndarray]]:
    """GGUF name -> Hugging Face name and values; tied."""
    rng = np.random.default_rng(0)
    names: Names = {}
    names |= {"token_embd.weight": ("model.embed_tokens.weight", (VOCAB, HIDDEN))}
    names |= {"output_norm.weight": ("model.norm.weight", (HIDDEN,))}
    for layer in range(LAYERS):
        for name, (hf_name, shape) in LAYER[architecture].items():
            names[f"blk.{layer}.{name}"] = (f"model.layers.{layer}.{hf_name}", shape)
    return {
        name: (hf_name, rng.integers(-8, 8, shape).astype(np.float32) / 8)
        for name, (hf_name, shape) in names.items()
    }


Keys = Callable[[gguf.GGUFWriter], Any]


def write(
    path: Path,
    architecture: str,
    keys: Keys = lambda writer: None,
    extra: dict[str, np.ndarray] | None = None,
) -> GgufFile:
    """Write as llama.cpp's converter does; it adds 1 to the norms of Gemma."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    keys(writer)
    for name, (_, values) in checkpoint(architecture).items():
        is_offset = architecture == "gemma2" and name.endswith("norm.weight")
        writer.add_tensor(name, values + 1 if is_offset else values)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


@pytest.mark.parametrize("architecture", LAYER)
def test_tensors_come_back_under_hugging_faces_names_and_fill_the_model(tmp_path, architecture):
    file = write(tmp_path / "m.gguf", architecture)
    found = dict(file.tensors())
    want = dict(checkpoint(architecture).values())
    assert set(found) == set(want)
    for name, values in want.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    config = ModelConfig.from_dict(file.config_dict())
    assert config.tie_word_embeddings
    store = WeightStore(make_layout(config), one_device())
    CheckpointLoader(config, store).load(file.tensors())
    assert not store.missing


def test_the_caps_and_the_window_of_gemma2_are_read(tmp_path):
    def keys(writer: gguf.GGUFWriter) -> None:
        writer.add_attn_logit_softcapping(5.0)
        writer.add_final_logit_softcapping(10.0)
        writer.add_sliding_window(32)

    config = ModelConfig.from_dict(write(tmp_path / "m.gguf", "gemma2", keys).config_dict())
    assert config.architecture == "Gemma2ForCausalLM"
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (5.0, 10.0)
    assert config.layer_windows == (32, None)
    assert config.attention_scale == 1 / 4


def test_absent_caps_of_gemma2_are_those_of_transformers(tmp_path):
    config = ModelConfig.from_dict(write(tmp_path / "m.gguf", "gemma2").config_dict())
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (50.0, 30.0)


@pytest.mark.parametrize(("window", "windows"), [(0, ()), (32, (32, 32))])
def test_the_window_and_the_rotated_share_of_phi3_are_read(tmp_path, window, windows):
    def keys(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(window)
        writer.add_rope_dimension_count(12)

    config = ModelConfig.from_dict(write(tmp_path / "m.gguf", "phi3", keys).config_dict())
    assert config.layer_windows == windows
    assert config.rotary_dim == 12


FACTORS = {
    "rope_factors_short.weight": np.linspace(1, 2, 8, dtype=np.float32),
    "rope_factors_long.weight": np.linspace(1, 9, 8, dtype=np.float32),
}


def test_the_two_lists_of_longrope_are_read(tmp_path):
    def keys(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_orig_ctx_len(64)
        writer.add_rope_scaling_attn_factors(1.25)

    file = write(tmp_path / "m.gguf", "phi3", keys, FACTORS)
    config = ModelConfig.from_dict(file.config_dict())
    short, long = (config.for_length(n).rope_scaling for n in (64, 65))
    assert short.frequency_factors == tuple(FACTORS["rope_factors_short.weight"].tolist())
    assert long.frequency_factors == tuple(FACTORS["rope_factors_long.weight"].tolist())
    assert short.attention_factor == long.attention_factor == 1.25
    CheckpointLoader(config, WeightStore(make_layout(config), one_device())).load(file.tensors())


def test_one_list_of_longrope_is_refused(tmp_path):
    name = "rope_factors_long.weight"
    file = write(tmp_path / "m.gguf", "phi3", extra={name: FACTORS[name]})
    with pytest.raises(ModelLoadError, match="rope_factors_short.weight: the tensor is missing"):
        file.config_dict()


OTHERS_KEYS: dict[str, tuple[str, Keys]] = {
    "a window of qwen2": ("qwen2", lambda w: w.add_sliding_window(32)),
    "a cap of phi3": ("phi3", lambda w: w.add_attn_logit_softcapping(5.0)),
    "a share of gemma2": ("gemma2", lambda w: w.add_rope_dimension_count(12)),
    "longrope of qwen2": (
        "qwen2",
        lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
    ),
}


@pytest.mark.parametrize("name", OTHERS_KEYS)
def test_keys_of_another_architecture_are_refused(tmp_path, name):
    architecture, keys = OTHERS_KEYS[name]
    with pytest.raises(ModelLoadError, match=f"{architecture}.(attn|attention|rope)"):
        write(tmp_path / "m.gguf", architecture, keys).config_dict()
