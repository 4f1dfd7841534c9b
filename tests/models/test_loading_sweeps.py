"""Damaged models: each damage is refused by name, or changes nothing that is loaded.

The default run flips one bit of each byte of a header; the slow one flips all eight.
"""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from models.loading.gguf_header import read_header
from models.loading.safetensors import SafetensorsFile
from models.loading.source import open_model
from tests.models.damaged_files import cut_lengths, load_model, outcome, replaced
from tests.models.test_checkpoint import checkpoint as plain_checkpoint
from tests.models.test_loading_gguf import checkpoint as gguf_checkpoint
from tests.models.test_loading_gguf import write as write_gguf
from tests.models.tiny_models import LLAMA

CONFIG = LLAMA | {"num_hidden_layers": 1}
JSON_FILES = ("config.json", "model.safetensors.index.json")
pytestmark = pytest.mark.timeout(300)


def tensors_of_one_layer() -> dict[str, np.ndarray]:
    tensors = plain_checkpoint()
    return {n: t for n, t in tensors.items() if ".layers." not in n or ".layers.0." in n}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One file of safetensors."""
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors_of_one_layer(), path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    """Three shards and their index."""
    path = tmp_path_factory.mktemp("sharded")
    (path / "config.json").write_text(json.dumps(CONFIG))
    weight_map = {}
    names = sorted(tensors_of_one_layer())
    for number in range(3):
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        part = {name: tensors_of_one_layer()[name] for name in names[number::3]}
        save_file(part, path / file)
        weight_map |= dict.fromkeys(part, file)
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    (path / "model.safetensors.index.json").write_text(text)
    return path


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", gguf_checkpoint())


@pytest.fixture(scope="module")
def original(folder):
    return load_model(folder)


@pytest.fixture(scope="module")
def gguf_original(gguf_file):
    return load_model(gguf_file)


def sweep_cuts(path: Path, model: Path, borders: list[int], original) -> None:
    whole = path.read_bytes()
    try:
        for length in cut_lengths(len(whole), borders):
            path.write_bytes(whole[:length])
            assert outcome(model, original, path.name) == "refused", length
        for surplus in (b"\0", b"}", bytes(4096)):
            path.write_bytes(whole + surplus)
            assert outcome(model, original, path.name) == "refused", surplus
    finally:
        path.write_bytes(whole)


def borders_of(path: Path) -> list[int]:
    entries = SafetensorsFile(path).entries.values()
    return [0, 8, *(entry.begin for entry in entries), *(entry.end for entry in entries)]


def test_a_safetensors_file_cut_anywhere_or_too_long_is_refused(folder, original):
    path = folder / "model.safetensors"
    sweep_cuts(path, folder, borders_of(path), original)


@pytest.mark.bugbank
def test_bugbank_R66_a_shard_cut_at_every_tensor_border_is_refused(sharded, original):
    for path in sorted(sharded.glob("*.safetensors")):
        sweep_cuts(path, sharded, borders_of(path), original)


@pytest.mark.bugbank
def test_bugbank_R65_each_shard_that_is_missing_is_named(sharded, original):
    assert outcome(sharded, original, "") == "same"
    for path in sorted(sharded.glob("*.safetensors")):
        away = path.rename(path.with_suffix(".away"))
        assert outcome(sharded, original, path.name) == "refused"
        away.rename(path)
    index = sharded / "model.safetensors.index.json"
    away = index.rename(index.with_suffix(".away"))
    assert (
        outcome(sharded, original, "model.safetensors.index.json beside model-00001") == "refused"
    )
    away.rename(index)


@pytest.mark.parametrize("name", JSON_FILES)
def test_a_json_file_cut_anywhere_or_too_long_is_refused(sharded, original, name):
    path = sharded / name
    if name == "config.json":
        sweep_cuts(path, sharded, [], original)
        return
    whole = path.read_bytes()
    for length in cut_lengths(len(whole), []):
        path.write_bytes(whole[:length])
        assert outcome(sharded, original, name) == "refused"
    path.write_bytes(whole)


def sweep_safetensors_header(path: Path, folder: Path, original, bits: int) -> dict[str, int]:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    counts = {"refused": 0, "same": 0}
    for position in range(end):
        for bit in range(8) if bits == 8 else (position % 8,):
            with replaced(path, position, bytes([data[position] ^ 1 << bit])):
                counts[outcome(folder, original, str(folder))] += 1
    return counts


def test_a_flipped_bit_of_a_safetensors_header_is_refused_or_changes_nothing(folder, original):
    counts = sweep_safetensors_header(folder / "model.safetensors", folder, original, bits=1)
    # What changes nothing: the texts in __metadata__, and one kind of white space for another.
    assert counts["refused"] > 1000 and counts["same"] < 20


@pytest.mark.slow
def test_every_flipped_bit_of_a_safetensors_header_is_refused_or_changes_nothing(folder, original):
    counts = sweep_safetensors_header(folder / "model.safetensors", folder, original, bits=8)
    assert counts["refused"] > 8000 and counts["same"] < 160


def test_a_renamed_tensor_is_a_missing_one_under_its_right_name(folder, original):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for name in tensors_of_one_layer():
        position = data.index(f'"{name}"'.encode()) + len(name) - 3
        with replaced(path, position, b"_"):
            assert outcome(folder, original, name.rsplit(".", 2)[-2]) == "refused"


def test_another_type_of_equal_width_is_refused(folder, original):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    position = data.index(b'"F32"')
    for dtype in (b"I32", b"U32"):
        with replaced(path, position + 1, dtype):
            outcome_of_flip = outcome(folder, original, "must hold float16, bfloat16, float32")
            assert outcome_of_flip == "refused"


def test_a_gguf_file_cut_anywhere_or_too_long_is_refused(gguf_file, gguf_original):
    infos = read_header(gguf_file).tensors.values()
    borders = [24, *(info.start for info in infos), *(i.start + i.num_bytes for i in infos)]
    sweep_cuts(gguf_file, gguf_file, borders, gguf_original)


def sweep_gguf_header(path: Path, original, bits: int) -> dict[str, int]:
    """What flips give; "other config" only where a key's value was hit."""
    data = path.read_bytes()
    end = min(info.start for info in read_header(path).tensors.values())
    infos = data.index(struct.pack("<Q", len("token_embd.weight")) + b"token_embd.weight")
    counts = {"refused": 0, "same": 0, "other config": 0}
    for position in range(end):
        for bit in range(8) if bits == 8 else (position % 8,):
            with replaced(path, position, bytes([data[position] ^ 1 << bit])):
                found = outcome(path, original, path.name)
            counts[found] += 1
            assert position < infos or found != "other config", position
    return counts


def test_a_flipped_bit_of_a_gguf_header_is_refused_or_changes_no_weight(gguf_file, gguf_original):
    counts = sweep_gguf_header(gguf_file, gguf_original, bits=1)
    assert counts["refused"] > 1000 and counts["other config"] < 40


@pytest.mark.slow
def test_every_flipped_bit_of_a_gguf_header_is_refused_or_changes_no_weight(
    gguf_file, gguf_original
):
    counts = sweep_gguf_header(gguf_file, gguf_original, bits=8)
    assert counts["refused"] > 10_000 and counts["other config"] < 320


def test_nothing_was_left_damaged(folder, sharded, gguf_file, original, gguf_original):
    assert outcome(folder, original, "") == outcome(sharded, original, "") == "same"
    assert outcome(gguf_file, gguf_original, "") == "same"
    assert open_model(str(folder), "auto").source.num_tensors == len(tensors_of_one_layer())
