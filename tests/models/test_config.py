"""Both styles of config.json are read alike, and what would change the result is refused."""

import json
import re

import pytest

from models.config import ModelConfig
from models.errors import ModelLoadError
from models.rope_scaling import RopeScaling
from models.unsupported_settings import ASKS_NOTHING
from tests.goldens_loader import GOLDEN_NAMES, GOLDENS_FOLDER
from tests.models.tiny_models import LLAMA, tiny_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
TOO_LONG = pytest.param(10**5000, id="5001 digits")


def qwen3(*absent: str) -> dict:
    config = LLAMA | {"architectures": ["Qwen3ForCausalLM"]}
    return {key: value for key, value in config.items() if key not in absent}


def test_every_number_of_a_config_is_read():
    changes = {"eos_token_id": [2, 3], "bos_token_id": 1, "torch_dtype": "float16"}
    config = tiny_config(**changes, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=11,
        hidden_size=10,
        intermediate_size=3,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=RopeScaling(),
        max_position_embeddings=64,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        eos_token_ids=(2, 3),
        bos_token_id=1,
        dtype="float16",
    )


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4}, LLAMA3])
def test_the_styles_of_transformers_4_and_5_give_the_same(scaling):
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling, "torch_dtype": "float16"}
    rope = {"rope_type": "default"} | (scaling or {})
    new = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    new |= {"rope_parameters": rope | {"rope_theta": 5e5}, "dtype": "float16"}
    assert ModelConfig.from_dict(old) == ModelConfig.from_dict(new)
    assert ModelConfig.from_dict(new).rope_theta == 5e5


def test_the_old_name_of_the_rope_type_is_read():
    rope = {"type": "linear", "factor": 4.0}
    want = RopeScaling(rope_type="linear", factor=4.0)
    assert tiny_config(rope_scaling=rope).rope_scaling == want


def test_rope_scaling_wins_over_rope_parameters_as_in_transformers():
    both = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_parameters": LLAMA3}
    assert tiny_config(**both).rope_scaling == RopeScaling(rope_type="linear", factor=4.0)


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_configs_that_transformers_wrote_are_read(name):
    config = json.loads((GOLDENS_FOLDER / name / "config.json").read_text())
    read = ModelConfig.from_dict(config)
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    assert (read.hidden_size, read.head_dim) == (config["hidden_size"], head_dim)
    assert read.dtype == "float32"
    assert read.rope_theta == 10000.0


def test_null_and_absent_keys_take_llamas_defaults():
    nulls = dict.fromkeys(("head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta"))
    config = tiny_config(**nulls, hidden_size=48, rope_scaling=None, max_position_embeddings=None)
    assert (config.head_dim, config.num_key_value_heads, config.rms_norm_eps) == (12, 4, 1e-6)
    assert (config.rope_theta, config.max_position_embeddings, config.dtype) == (
        10000.0,
        2048,
        "bfloat16",
    )
    assert (config.eos_token_ids, config.bos_token_id) == ((), None)


def test_absent_keys_of_qwen3_take_its_own_defaults():
    config = ModelConfig.from_dict(qwen3("head_dim", "max_position_embeddings"))
    assert (config.head_dim, config.max_position_embeddings) == (128, 32768)
    with pytest.raises(ModelLoadError, match="must be a multiple of kv_heads=32; got 4"):
        ModelConfig.from_dict(qwen3("num_key_value_heads"))


def test_llama3_without_its_original_length_takes_the_models():
    without = {key: value for key, value in LLAMA3.items() if not key.startswith("original")}
    scaling = tiny_config(rope_scaling=without).rope_scaling
    assert scaling.original_max_position_embeddings == 64
    outside = tiny_config(rope_scaling=LLAMA3, original_max_position_embeddings=16).rope_scaling
    assert outside.original_max_position_embeddings == 16


def test_frequency_factors_are_read():
    rope = {"rope_type": "frequency_factors", "frequency_factors": [1, 2.5]}
    assert tiny_config(rope_scaling=rope).rope_scaling.frequency_factors == (1.0, 2.5)


@pytest.mark.parametrize(("head_dim", "stored"), [(2, 64), (64, 64), (80, 128), (256, 256)])
def test_the_stored_head_dim_is_the_next_that_kernels_take(head_dim, stored):
    config = tiny_config(head_dim=head_dim)
    assert config.stored_head_dim == stored
    assert config.num_query_heads_per_kv_head == 2


INTEGERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


@pytest.mark.parametrize("key", INTEGERS)
@pytest.mark.parametrize("value", [True, 0, -1, 4.0, "4", [4], 1 << 40, TOO_LONG])
def test_what_is_no_integer_within_bounds_is_refused(key, value):
    with pytest.raises(ModelLoadError, match=f"^config.json: {key} must be an integer in"):
        tiny_config(**{key: value})


@pytest.mark.parametrize("key", INTEGERS[:5])
def test_missing_integers_are_refused(key):
    config = {name: value for name, value in LLAMA.items() if name != key}
    with pytest.raises(ModelLoadError, match=f"^a/config.json: {key} must be .*; got None$"):
        ModelConfig.from_dict(config, "a/config.json")


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
@pytest.mark.parametrize(
    "value",
    [
        True,
        0,
        -1e-5,
        float("nan"),
        float("inf"),
        "1",
        pytest.param(10**400, id="401 digits"),
        TOO_LONG,
    ],
)
def test_what_is_no_finite_number_above_0_is_refused(key, value):
    with pytest.raises(ModelLoadError, match=f"^config.json: {key} must be a finite number above"):
        tiny_config(**{key: value})


@pytest.mark.parametrize("key", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
@pytest.mark.parametrize("value", ["false", 0, 1, []])
def test_what_is_no_boolean_is_refused(key, value):
    with pytest.raises(
        ModelLoadError, match=rf"{key} must be true or false; got {re.escape(repr(value))}$"
    ):
        tiny_config(**{key: value})


OTHER_REFUSALS = {
    "no architecture": ({"architectures": None}, "architectures must be a list that .*; got None"),
    "an empty list": ({"architectures": []}, "architectures must be a list"),
    "a bare architecture": ({"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
    "uneven heads": ({"num_attention_heads": 5}, "must be a multiple of kv_heads=2; got 5"),
    "an odd head dim": ({"head_dim": 5}, "head_dim must be even; got 5"),
    "a head dim that no kernel takes": ({"head_dim": 258}, r"head_dim must be .* \[1, 256\]"),
    "a hidden size without heads": (
        {"head_dim": None},
        "hidden_size must be a multiple of heads=4",
    ),
    "a token id as a string": (
        {"eos_token_id": "2"},
        "eos_token_id must be a token id .*; got '2'",
    ),
    "a boolean token id": ({"eos_token_id": [2, True]}, "eos_token_id must be a token id"),
    "a negative token id": ({"bos_token_id": -1}, "bos_token_id must be a token id"),
    "a token id past int32": ({"eos_token_id": 1 << 31}, "eos_token_id must be a token id"),
    "a type we cannot compute in": ({"dtype": "float8_e4m3fn"}, "dtype must be one of float32"),
    "the old name of it": ({"torch_dtype": "int8"}, "torch_dtype must be one of float32"),
}


@pytest.mark.parametrize("name", OTHER_REFUSALS)
def test_refused_is(name):
    changes, message = OTHER_REFUSALS[name]
    with pytest.raises(ModelLoadError, match=f"^config.json: .*{message}"):
        tiny_config(**changes)


def test_a_refused_value_that_is_long_is_cut():
    with pytest.raises(ModelLoadError) as error:
        tiny_config(head_dim="4" * 10_000)
    assert len(str(error.value)) < 200


LINEAR = {"rope_type": "linear", "factor": 2.0}
ROPE_REFUSALS = {
    "no object": ([1], "rope_.* must be an object; got \\[1\\]"),
    "an unknown type": ({"rope_type": "dynamic", "factor": 4.0}, "rope_type must be .*'dynamic'"),
    "yarn without a factor": ({"rope_type": "yarn"}, "factor must be .* above 0; got None"),
    "yarn's other scale": (
        {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0},
        "mscale is not supported with rope type yarn",
    ),
    "yarn with its ramp uncut": (
        {"rope_type": "yarn", "factor": 4.0, "truncate": False},
        "truncate must be True with rope type yarn",
    ),
    "an unknown type by its old name": ({"type": "su"}, "type must be one of .*; got 'su'"),
    "a type that is no name": ({"rope_type": ["linear"]}, "rope_type must be one of"),
    "linear without a factor": ({"type": "linear"}, "factor must be .* above 0; got None"),
    "a factor of NaN": (LINEAR | {"factor": float("nan")}, "factor must be .* above 0; got nan"),
    "a boolean factor": (LINEAR | {"factor": True}, "factor must be .*; got True"),
    "llama3 without a border": (LLAMA3 | {"low_freq_factor": None}, "low_freq_factor must be"),
    "crossed borders": (LLAMA3 | {"low_freq_factor": 4.0}, "low_freq_factor must be below"),
    "half an original length": (
        LLAMA3 | {"original_max_position_embeddings": 0.5},
        "original_max_position_embeddings must be an integer",
    ),
    "a factor without a type": ({"factor": 4.0}, "factor must be 1 with rope type default; got 4"),
    "partial rotation": (
        LINEAR | {"partial_rotary_factor": 0.5},
        "partial_rotary_factor must be 1",
    ),
    "yarn's numbers": (LINEAR | {"beta_fast": 32}, "beta_fast is not supported with .* linear"),
    "sections": ({"type": "default", "mrope_section": [1, 1]}, "mrope_section is not supported"),
    "one object a layer type": ({"full_attention": LINEAR}, "full_attention is not supported"),
    "too few factors": (
        {"rope_type": "frequency_factors", "frequency_factors": [1.0]},
        "frequency_factors must be a list of 2 finite",
    ),
    "a factor of 0": (
        {"rope_type": "frequency_factors", "frequency_factors": [1.0, 0.0]},
        "frequency_factors must be a list of 2 finite",
    ),
}


@pytest.mark.parametrize("name", ROPE_REFUSALS)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_refused_as_rope_is(name, key):
    rope, message = ROPE_REFUSALS[name]
    with pytest.raises(ModelLoadError, match=f"^config.json: .*{message}"):
        tiny_config(**{key: rope})


def test_what_changes_nothing_beside_a_rope_type_is_accepted():
    inert = {"original_max_position_embeddings": 32, "finetuned": True, "attention_factor": None}
    rope = LINEAR | inert | {"partial_rotary_factor": 1.0}
    assert tiny_config(rope_scaling=rope) == tiny_config(rope_scaling=LINEAR)


# One value of each that would change the result, under the names that configs have.
CHANGE_THE_RESULT = {
    "hidden_act": "gelu",
    "hidden_activation": "gelu_pytorch_tanh",
    "quantization_config": {"quant_method": "gptq"},
    "compression_config": {"format": "int-quantized"},
    "partial_rotary_factor": 0.5,
    "rotary_pct": 0.25,
    "rope_pct": 0.25,
    "rotary_dim": 32,
    "rope_interleave": True,
    "rope_local_base_freq": 10000.0,
    "no_rope_layers": [1, 0, 1],
    "no_rope_layer_interval": 4,
    "position_embedding_type": "nope",
    "use_alibi": True,
    "use_sliding_window": True,
    "sliding_window": 4096,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "attention_chunk_size": 8192,
    "use_bidirectional_attention": True,
    "is_causal": False,
    "is_encoder_decoder": True,
    "add_cross_attention": True,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "mlp_multipliers": [0.5, 0.5],
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "attn_soft_cap": 5.0,
    "logit_scale": 0.0625,
    "logits_scaling": 8.0,
    "query_pre_attn_scalar": 144,
    "attn_temperature_tuning": True,
    "clip_qkv": 8.0,
    "scale_emb": 12,
    "scale_embedding": True,
    "scale_depth": 1.4,
    "dim_model_base": 256,
    "use_qk_norm": True,
    "qk_layernorm": True,
    "parallel_attn": True,
    "use_parallel_residual": True,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 64,
    "kv_lora_rank": 512,
    "attn_output_gate": True,
}


@pytest.mark.parametrize("key", CHANGE_THE_RESULT)
def test_a_setting_that_would_change_the_result_is_refused_by_name(key):
    value = CHANGE_THE_RESULT[key]
    message = rf"^config.json: {key} (must be|is not supported).*; got {re.escape(repr(value))}$"
    with pytest.raises(ModelLoadError, match=message):
        tiny_config(**{key: value})


def test_every_pattern_of_the_list_refuses_something():
    for pattern in ASKS_NOTHING:
        without = {key: accepted for key, accepted in ASKS_NOTHING.items() if key != pattern}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("models.unsupported_settings.ASKS_NOTHING", without)
            slipped = [key for key in CHANGE_THE_RESULT if _is_read({key: CHANGE_THE_RESULT[key]})]
        assert slipped, pattern


def _is_read(changes: dict) -> bool:
    try:
        tiny_config(**changes)
    except ModelLoadError:
        return False
    return True


@pytest.mark.parametrize("key", CHANGE_THE_RESULT)
def test_null_asks_for_nothing(key):
    assert tiny_config(**{key: None}) == tiny_config()


HARMLESS = {
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "embedding_multiplier": 1,
    "logits_scaling": 1.0,
    "layer_types": ["full_attention"] * 3,
    "no_rope_layers": [],
    "num_experts": 0,
    "quantization_config": {},
    "attention_dropout": 0.1,
    "initializer_range": 0.2,
    "pretraining_tp": 2,
    "use_cache": False,
    "max_window_layers": 28,
    "transformers_version": "4.31.0",
}


@pytest.mark.parametrize("key", HARMLESS)
def test_a_setting_that_changes_nothing_is_accepted(key):
    assert tiny_config(**{key: HARMLESS[key]}) == tiny_config()


def test_a_window_that_is_switched_off_is_accepted():
    assert tiny_config(sliding_window=4096, use_sliding_window=False) == tiny_config()


def test_layer_types_that_are_no_list_are_refused():
    with pytest.raises(
        ModelLoadError, match="layer_types is not supported .*; got 'full_attention'"
    ):
        tiny_config(layer_types="full_attention")
