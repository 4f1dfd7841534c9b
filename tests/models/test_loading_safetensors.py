"""Tests of models/loading/safetensors.py and the strict JSON below it."""

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from models.errors import ModelLoadError
from models.loading.safetensors import DTYPES, SafetensorsFile, SafetensorsFolder
from models.loading.strict_json import parse_json_object
from tests.goldens_loader import GOLDEN_NAMES, load_golden

ALL_DTYPES = sorted(DTYPES)


def write(path: Path, header: object, data: bytes = b"", header_bytes: int | None = None) -> Path:
    """A file of exactly this header (bytes as they are, else as JSON) and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if header_bytes is None else header_bytes
    path.write_bytes(length.to_bytes(8, "little") + text + data)
    return path


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    """Three tensors, one of them empty, in 40 bytes of data."""
    path = tmp_path / "model.safetensors"
    tensors = {
        "layers.0.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "layers.0.bias": np.arange(4, dtype=np.int32),
        "none": np.zeros(0, np.float32),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def contents(path: Path) -> dict[str, tuple]:
    file = SafetensorsFile(path)
    arrays = {name: file.array(name) for name in file.entries}
    return {name: (a.dtype, a.shape, a.tobytes()) for name, a in arrays.items()}


@pytest.mark.parametrize("dtype", ["?", "u1", "i2", "i4", "u8", "f2", "f4", "f8"])
def test_arrays_saved_by_the_safetensors_package_come_back_equal(tmp_path, dtype):
    array = np.random.default_rng(0).integers(0, 2, (3, 1, 5)).astype(dtype)
    save_file({"a": array, "scalar": np.array(1, dtype)}, tmp_path / "x.safetensors")
    read = dict(SafetensorsFolder(tmp_path / "x.safetensors").tensors())
    assert read["a"].dtype == array.dtype
    np.testing.assert_array_equal(read["a"], array)
    assert read["scalar"].shape == ()


def test_bfloat16_saved_by_the_safetensors_package_comes_back_equal(tmp_path):
    array = np.random.default_rng(0).normal(size=(4, 6)).astype(ml_dtypes.bfloat16)
    save_file({"a": array}, tmp_path / "x.safetensors")
    read = SafetensorsFolder(tmp_path / "x.safetensors").tensor("a")
    assert read.dtype == ml_dtypes.bfloat16
    assert read.tobytes() == array.tobytes()


@pytest.mark.parametrize("name", ALL_DTYPES)
def test_every_dtype_is_read_with_its_width(tmp_path, name):
    width = DTYPES[name].itemsize
    data = bytes(1 for _ in range(6 * width))
    path = write(tmp_path / "x.safetensors", {"a": entry(name, [2, 3], [0, 6 * width])}, data)
    array = SafetensorsFile(path).array("a")
    assert (array.dtype, array.shape, array.tobytes()) == (DTYPES[name], (2, 3), data)


def test_float8_values_are_those_of_the_format(tmp_path):
    header = {"a": entry("F8_E4M3", [2], [0, 2]), "b": entry("F8_E5M2", [1], [2, 3])}
    file = SafetensorsFile(write(tmp_path / "x.safetensors", header, bytes([0x38, 0x7E, 0x3C])))
    assert file.array("a").astype(np.float32).tolist() == [1.0, 448.0]
    assert file.array("b").astype(np.float32).tolist() == [1.0]


def test_tensors_may_stand_in_the_header_in_any_order(tmp_path):
    header = {"second": entry(shape=[1], offsets=[4, 8]), "first": entry(shape=[1], offsets=[0, 4])}
    data = np.array([1, 2], np.float32).tobytes()
    file = SafetensorsFile(write(tmp_path / "x.safetensors", header, data))
    assert list(file.entries) == ["first", "second"]
    assert file.array("second").tolist() == [2.0]


def test_arrays_cannot_be_written_to(small_file):
    array = SafetensorsFile(small_file).array("layers.0.weight")
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 1


def test_an_array_outlives_its_file_object(small_file):
    array = SafetensorsFolder(small_file).tensor("layers.0.weight")
    assert array.sum() == 15


@pytest.mark.parametrize("percent", range(100))
def test_a_file_cut_anywhere_is_refused(small_file, tmp_path, percent):
    whole = small_file.read_bytes()
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(whole[: len(whole) * percent // 100])
    with pytest.raises(ModelLoadError, match="cut.safetensors"):
        SafetensorsFile(cut)


def test_a_file_with_bytes_after_the_last_tensor_is_refused(small_file):
    small_file.write_bytes(small_file.read_bytes() + b"\0")
    with pytest.raises(ModelLoadError, match="must end with its last tensor"):
        SafetensorsFile(small_file)


def test_a_flipped_bit_in_the_header_is_refused_or_changes_nothing_but_a_name(small_file):
    """A name is free text, so only the model's own list of weights can notice such a flip."""
    whole = small_file.read_bytes()
    original = contents(small_file)
    header_end = 8 + int.from_bytes(whole[:8], "little")
    num_refused = 0
    for bit in range(header_end * 8):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        small_file.write_bytes(flipped)
        try:
            read = contents(small_file)
        except ModelLoadError:
            num_refused += 1
            continue
        assert sorted(map(str, read.values())) == sorted(map(str, original.values()))
        assert len(read.keys() - original.keys()) <= 1
    assert num_refused > header_end * 8 // 2


@pytest.mark.parametrize(
    ("header", "data", "reason"),
    [
        ({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12), "must begin at byte"),
        ({"a": entry(), "b": entry()}, bytes(8), "must begin at byte"),
        ({"a": entry(), "b": entry(offsets=[12, 20])}, bytes(20), "must begin at byte"),
        ({"a": entry(offsets=[4, 12])}, bytes(12), "must begin at byte"),
        ({"a": entry(offsets=[8, 0])}, bytes(8), "data_offsets must be"),
        ({"a": entry(offsets=[-8, 0])}, bytes(8), "data_offsets must be"),
        ({"a": entry(offsets=[0, 8.0])}, bytes(8), "data_offsets must be"),
        ({"a": entry(offsets=[False, 8])}, bytes(8), "data_offsets must be"),
        ({"a": entry(offsets=[0, 8, 8])}, bytes(8), "data_offsets must be"),
        ({"a": entry(offsets=[0, 2**64])}, bytes(8), "data_offsets must be"),
        ({"a": entry(offsets="08")}, bytes(8), "data_offsets must be"),
        ({"a": entry(shape=[3])}, bytes(8), "must have 12 bytes"),
        ({"a": entry(shape=[-2])}, bytes(8), "shape must be"),
        ({"a": entry(shape=[True, 2])}, bytes(8), "shape must be"),
        ({"a": entry(shape=[2**63])}, bytes(8), "shape must be"),
        ({"a": entry(shape=[2**62, 2**62])}, bytes(8), "fit 63 bits"),
        ({"a": entry(shape=[0, 2**62], offsets=[0, 0])}, b"", "fit 63 bits"),
        ({"a": entry(shape=[1] * 33, offsets=[0, 4])}, bytes(4), "shape must be"),
        ({"a": entry("F31")}, bytes(8), "dtype must be"),
        ({"a": entry("f32")}, bytes(8), "dtype must be"),
        ({"a": entry("F4", [2], [0, 1])}, bytes(1), "dtype must be"),
        ({"a": entry(["F32"])}, bytes(8), "dtype must be"),
        ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8), "dtype, shape and data_offsets"),
        ({"a": entry() | {"more": 1}}, bytes(8), "dtype, shape and data_offsets"),
        ({"a": [1]}, bytes(8), "dtype, shape and data_offsets"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__ must hold strings"),
        ({"__metadata__": []}, b"", "__metadata__ must hold strings"),
        ([], b"", "JSON header"),
        (b' {"a":1}', b"", "JSON header"),
        (b"", b"", "JSON header"),
        (b'{"a": \xff}', b"", "strict UTF-8 JSON"),
        (b'{"a": 1', b"", "strict UTF-8 JSON"),
        (b'{"a": NaN}', b"", "NaN is not a JSON number"),
        (b'{"a": 1, "a": 1}', b"", "stands twice"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, b"", "nest at most"),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b"", "nest at most"),
        (b'{"a":' + b"9" * 5000 + b"}", b"", "strict UTF-8 JSON"),
    ],
)
def test_a_broken_header_is_refused_with_its_reason(tmp_path, header, data, reason):
    path = write(tmp_path / "x.safetensors", header, data)
    with pytest.raises(ModelLoadError, match=reason) as caught:
        SafetensorsFile(path)
    assert "x.safetensors" in str(caught.value)


@pytest.mark.parametrize("header_bytes", [0, 1, 3, 100, 2**31, 2**63, 2**64 - 1])
def test_a_wrong_header_length_is_refused(tmp_path, header_bytes):
    path = write(tmp_path / "x.safetensors", {}, header_bytes=header_bytes)
    with pytest.raises(ModelLoadError, match="x.safetensors"):
        SafetensorsFile(path)


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        (b"PK\x03\x04", "zip"),
        (b"\x80\x02}q\x00", "pickle"),
        (b"GGUF\x03\0\0\0", "GGUF"),
        (b"version https://git-lfs", "LFS"),
    ],
)
def test_another_format_under_the_name_is_told_apart(tmp_path, start, reason):
    path = tmp_path / "x.safetensors"
    path.write_bytes(start + b"x" * 64)
    with pytest.raises(ModelLoadError, match=reason):
        SafetensorsFile(path)


def test_a_header_as_long_as_a_pickle_magic_still_loads(tmp_path):
    """Length 0x0280 has the first bytes 80 02, those of a pickle."""
    text = b"{}".ljust(0x280)
    assert SafetensorsFile(write(tmp_path / "x.safetensors", text)).entries == {}


def test_what_is_not_a_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    for name in ("pipe", "folder", "missing"):
        with pytest.raises(ModelLoadError, match="must be a file"):
            SafetensorsFile(tmp_path / f"{name}.safetensors")


def write_shards(folder: Path, weight_map: object) -> None:
    for name in ("a", "b"):
        save_file({name: np.ones(2, np.float32)}, folder / f"{name}.safetensors")
    text = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def test_shards_are_read_as_one_set_of_tensors(tmp_path):
    write_shards(tmp_path, {"a": "a.safetensors", "b": "b.safetensors"})
    folder = SafetensorsFolder(tmp_path)
    assert folder.names() == ("a", "b")
    assert [tensor.array().tolist() for _, tensor in folder.tensors()] == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"a": "c.safetensors"}, "must be a file"),
        ({"a": "b.safetensors"}, "must hold tensor 'a'"),
        ({"a": "../a.safetensors"}, "must be a .safetensors file name"),
        ({"a": "/a.safetensors"}, "must be a .safetensors file name"),
        ({"a": "a.bin"}, "must be a .safetensors file name"),
        ({"a": 1}, "must be a .safetensors file name"),
        ({"a": "a.safetensors", "b": "A.safetensors"}, "differ only in case"),
        ({}, "must have a weight_map"),
        (["a"], "must have a weight_map"),
    ],
)
def test_a_broken_index_is_refused_with_its_reason(tmp_path, weight_map, reason):
    write_shards(tmp_path, weight_map)
    with pytest.raises(ModelLoadError, match=reason):
        SafetensorsFolder(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    write_shards(tmp_path, {"a": "a.safetensors", "b": "b.safetensors"})
    save_file(
        {"a": np.ones(1, np.float32), "b": np.ones(1, np.float32)}, tmp_path / "b.safetensors"
    )
    with pytest.raises(ModelLoadError, match="'a' must stand in one file"):
        SafetensorsFolder(tmp_path)


def test_an_unknown_tensor_name_is_a_load_error(small_file):
    with pytest.raises(ModelLoadError, match="must hold tensor 'x'"):
        SafetensorsFolder(small_file).tensor("x")


def test_shards_without_their_index_are_refused(tmp_path):
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "model-00001-of-00001.safetensors")
    with pytest.raises(ModelLoadError, match="must hold model.safetensors.index.json beside model"):
        SafetensorsFolder(tmp_path)


def test_memory_of_the_file_is_given_back_and_can_be_read_again(tmp_path):
    tensors = {f"t{i}": np.full(1 << 20, i, np.float32) for i in range(16)}
    save_file(tensors, tmp_path / "model.safetensors")
    folder = SafetensorsFolder(tmp_path)
    before, kept = mapped_bytes(), []
    for name, tensor in folder.tensors():
        array = tensor.array()
        kept.append((name, array))
        assert array.sum() == int(name[1:]) << 20
        tensor.release()
        assert mapped_bytes() - before < 2 << 20  # of 64 MiB
    assert all(array[-1] == int(name[1:]) for name, array in kept)


def mapped_bytes() -> int:
    """Bytes of mapped files that this process holds in memory."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("only Linux tells")
    line = next(line for line in status.read_text().splitlines() if line.startswith("RssFile"))
    return int(line.split()[1]) << 10


def test_pickled_weights_are_refused_with_advice(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(ModelLoadError, match="pytorch_model.bin, a pickle"):
        SafetensorsFolder(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match="must hold model.safetensors or"):
        SafetensorsFolder(tmp_path)


def test_a_link_out_of_the_folder_is_refused(small_file, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(small_file)
    with pytest.raises(ModelLoadError, match="must not link"):
        SafetensorsFolder(folder)


def test_a_hub_cache_with_its_links_to_blobs_is_read(small_file, tmp_path):
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    blob = tmp_path / "models--org--name" / "blobs" / "abcd"
    blob.parent.mkdir()
    blob.write_bytes(small_file.read_bytes())
    (snapshot / "model.safetensors").symlink_to("../../blobs/abcd")
    assert "layers.0.weight" in SafetensorsFolder(snapshot).names()


@pytest.mark.parametrize("text", [b"[]", b"1e999", b'{"a": 1e999}', b'{"a": Infinity}', b""])
def test_a_config_that_is_not_strict_json_is_refused(small_file, text):
    (small_file.parent / "config.json").write_bytes(text)
    with pytest.raises(ModelLoadError, match="config.json"):
        SafetensorsFolder(small_file).config_dict()


def test_a_missing_config_is_refused(small_file):
    with pytest.raises(ModelLoadError, match="config.json must be a file"):
        SafetensorsFolder(small_file.parent).config_dict()


def test_json_of_64_levels_is_read_and_of_65_is_not():
    def nested(levels: int) -> bytes:
        return b'{"a":' * (levels - 1) + b"{}" + b"}" * (levels - 1)

    parse_json_object(nested(64), "text")
    with pytest.raises(ModelLoadError, match="at most 64 levels"):
        parse_json_object(nested(65), "text")


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_golden_checkpoints_load_and_have_no_near_ties(name):
    golden = load_golden(name)
    folder = SafetensorsFolder(golden.folder)
    config = folder.config_dict()
    embedding = folder.tensor("model.embed_tokens.weight")
    assert embedding.shape == (config["vocab_size"], config["hidden_size"])
    assert all(np.isfinite(array).all() for _, array in folder.tensors())
    assert [len(case.prompt) for case in golden.logits] == [1, 9, 40]
    cases = (golden.alone, *golden.mixed)
    assert len(cases) == 18
    assert all(len(case.tokens) == 64 and case.margins.min() > 1e-3 for case in cases)


def test_there_are_golden_checkpoints():
    assert len(GOLDEN_NAMES) >= 6
