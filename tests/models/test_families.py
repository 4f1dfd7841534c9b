"""What each family reads of its config.json, and that others still refuse it."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from models.config import ModelConfig
from models.errors import ModelLoadError
from models.families.phi3 import Phi3ForCausalLM
from models.kernels import model_kernels
from models.kv_cache import cache_geometries, layer_places
from models.layers import OffsetRMSNorm, ScaledEmbedding, compute_logits
from models.loading.placements import decoder_placements
from pallas_kernels.fused.xla_fused import ACTIVATIONS
from tests.models.tiny_models import LLAMA, make_layout


def config_of(family: str, **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(LLAMA | {"architectures": [f"{family}ForCausalLM"]} | changes)


SLIDING, FULL = "sliding_attention", "full_attention"
QWEN = {"use_sliding_window": True, "sliding_window": 8}
WINDOWS = {
    "Mistral, every layer": ("Mistral", {"sliding_window": 8}, (8, 8, 8)),
    "Mistral, none": ("Mistral", {"sliding_window": None}, ()),
    "Mistral, its default": ("Mistral", {"max_position_embeddings": 5000}, (4096,) * 3),
    "Mistral, longer than any sequence": ("Mistral", {"sliding_window": 64}, ()),
    "Phi3, every layer": ("Phi3", {"sliding_window": 8}, (8, 8, 8)),
    "Phi3, its default": ("Phi3", {}, ()),
    "Gemma2, every other layer": ("Gemma2", {"sliding_window": 8}, (8, None, 8)),
    "Gemma2, none": ("Gemma2", {"sliding_window": None}, ()),
    "Gemma2, as layer_types say": (
        "Gemma2",
        {"sliding_window": 8, "layer_types": [FULL, FULL, SLIDING]},
        (None, None, 8),
    ),
    "Qwen2, off": ("Qwen2", QWEN | {"use_sliding_window": False}, ()),
    "Qwen2, no switch": ("Qwen2", {"sliding_window": 8}, ()),
    "Qwen2, layers from 2 on": ("Qwen2", QWEN | {"max_window_layers": 2}, (None, None, 8)),
    "Qwen2, the default of 28 layers": ("Qwen2", QWEN, ()),
    "Qwen2, as layer_types say": ("Qwen2", QWEN | {"layer_types": [SLIDING] * 3}, (8, 8, 8)),
    "Qwen3, layers from 1 on": ("Qwen3", QWEN | {"max_window_layers": 1}, (None, 8, 8)),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_are_as_in_transformers(name: str) -> None:
    family, changes, windows = WINDOWS[name]
    assert config_of(family, **changes).layer_windows == windows


WRONG_WINDOWS = {
    "no length": ("Mistral", {"sliding_window": 0}, "sliding_window must be an integer"),
    "a boolean": ("Phi3", {"sliding_window": True}, "sliding_window must be an integer"),
    "too few layer types": ("Gemma2", {"layer_types": [FULL]}, "layer_types must be a list of 3"),
    "an unknown layer type": (
        "Qwen2",
        {"layer_types": [FULL, FULL, "chunked_attention"]},
        "layer_types must hold only full_attention, sliding_attention; got 'chunked",
    ),
    "a layer type without a window": (
        "Qwen2",
        {"layer_types": [SLIDING] * 3},
        "sliding_window must be an integer .*; got None",
    ),
    "layer types that the family does not read": (
        "Mistral",
        {"layer_types": [FULL, SLIDING, FULL]},
        "layer_types is not supported",
    ),
}


@pytest.mark.parametrize("name", WRONG_WINDOWS)
def test_refused_as_window_is(name: str) -> None:
    family, changes, message = WRONG_WINDOWS[name]
    with pytest.raises(ModelLoadError, match=f"^config.json: {message}"):
        config_of(family, **changes)


OF_ONE_FAMILY = {
    "sliding_window": (8, {"Mistral", "Phi3", "Gemma2", "Qwen2", "Qwen3"}),
    "use_sliding_window": (True, {"Qwen2", "Qwen3"}),
    "partial_rotary_factor": (0.5, {"Phi3"}),
    "attn_logit_softcapping": (5.0, {"Gemma2"}),
    "final_logit_softcapping": (5.0, {"Gemma2"}),
    "query_pre_attn_scalar": (24, {"Gemma2"}),
    "hidden_activation": ("gelu_pytorch_tanh", {"Gemma2"}),
    "router_logit_softcapping": (5.0, set()),
}
FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral", "Phi3", "Gemma2")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("key", OF_ONE_FAMILY)
def test_a_key_is_read_by_its_families_and_refused_by_the_others(key: str, family: str) -> None:
    value, families = OF_ONE_FAMILY[key]
    if family in families:
        config_of(family, **{key: value})
        return
    with pytest.raises(ModelLoadError, match=f"^config.json: {key} (must be|is not supported)"):
        config_of(family, **{key: value})


def test_other_activations_than_gemmas_own_are_refused() -> None:
    for changes in ({"hidden_activation": "silu"}, {"hidden_act": "relu"}):
        with pytest.raises(ModelLoadError, match="must be 'gelu_pytorch_tanh'"):
            config_of("Gemma2", **changes)
    config_of("Gemma2", hidden_act="gelu_pytorch_tanh")


def test_absent_keys_of_gemma2_take_its_defaults_and_null_takes_none() -> None:
    absent = ("num_key_value_heads", "head_dim", "tie_word_embeddings")
    given = {key: value for key, value in LLAMA.items() if key not in absent}
    config = ModelConfig.from_dict(given | {"architectures": ["Gemma2ForCausalLM"]})
    assert (config.num_key_value_heads, config.head_dim) == (4, 256)
    assert config.tie_word_embeddings
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (50, 30)
    assert config.attention_scale == 1 / 16
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    config = config_of("Gemma2", **caps)
    assert config.attn_logit_softcapping is config.final_logit_softcapping is None


@pytest.mark.parametrize("bias", [True, False])
def test_qwen2_has_biases_on_q_k_and_v_alone_whatever_the_config_says(bias: bool) -> None:
    layout = make_layout(config_of("Qwen2", attention_bias=bias, mlp_bias=bias))
    biases = {leaf.path for leaf in layout.leaves if leaf.path.endswith("bias")}
    assert biases == {f"layers.{layer}.self_attn.qkv_proj.bias" for layer in range(3)}


def test_layers_of_one_window_share_a_cache_group() -> None:
    types = [SLIDING, FULL, SLIDING]
    config = config_of("Gemma2", sliding_window=8, layer_types=types)
    geometries = cache_geometries(config, page_size=16, dtype="float32")
    assert [(g.sliding_window, g.num_layers) for g in geometries] == [(None, 1), (8, 2)]
    assert layer_places(config) == ((1, 0), (0, 0), (1, 1))


def test_layers_without_windows_share_the_only_group() -> None:
    config = config_of("Llama")
    (geometry,) = cache_geometries(config, page_size=16, dtype="float32")
    assert geometry.sliding_window is None and geometry.num_layers == 3
    assert layer_places(config) == ((0, 0), (0, 1), (0, 2))


def test_a_window_of_every_layer_leaves_no_group_of_full_attention() -> None:
    config = config_of("Mistral", sliding_window=8)
    (geometry,) = cache_geometries(config, page_size=16, dtype="float32")
    assert geometry.sliding_window == 8


def test_phi3_splits_its_fused_tensors_as_llama_fuses_its_parts() -> None:
    config = config_of("Phi3")
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(heads * 4, 10)) for heads in (4, 2, 2))
    gate, up = rng.normal(size=(2, 3, 10))
    llama = {p.target: p for p in decoder_placements(config)}
    phi3 = {p.target: p for p in Phi3ForCausalLM.placements(config)}
    for target, parts in (
        ("self_attn.qkv_proj.weight", (q, k, v)),
        ("mlp.gate_up_proj.weight", (gate, up)),
    ):
        assert phi3[target].parts == (target,)
        want = llama[target].assemble(*parts)
        got = phi3[target].assemble(np.concatenate(parts))
        assert [piece.start for piece in got] == [piece.start for piece in want]
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one.values, other.values)
    assert set(phi3) == set(llama)


def test_the_offset_norm_adds_one_in_float32() -> None:
    norm = OffsetRMSNorm(4, eps=0.0, dtype="bfloat16", kernels=model_kernels("xla", "cpu"))
    norm.weight[...] = jnp.full(4, 2**-9, jnp.bfloat16)  # 1 + 2**-9 is no bfloat16
    x = jnp.array([[8.0, -8.0, 8.0, -8.0]], jnp.float32)
    np.testing.assert_array_equal(norm(x), np.sign(x) * (1 + 2**-9))


def test_the_embedding_scale_is_rounded_to_the_weights_type() -> None:
    embedding = ScaledEmbedding(2, 3072, dtype="bfloat16")
    embedding.weight[...] = jnp.ones((2, 3072), jnp.bfloat16)
    assert embedding(jnp.array([1]))[0, 0] == 55.5  # sqrt(3072) is 55.43


def test_gelu_is_its_tanh_approximation() -> None:
    x = np.linspace(-4, 4, 9)
    want = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    np.testing.assert_allclose(
        ACTIVATIONS["gelu_tanh"](jnp.asarray(x, jnp.float32)), want, atol=1e-6
    )


def test_a_soft_cap_bounds_the_logits_of_the_vocabulary() -> None:
    weight, hidden = jnp.eye(3), jnp.array([[0.0, 5.0, -500.0]])
    logits = compute_logits(weight, hidden, 5.0)
    np.testing.assert_allclose(logits, [[0, 5 * np.tanh(1), -5]], rtol=1e-6)
