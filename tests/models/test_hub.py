"""Repositories are fetched with what is needed of them, or refused in one sentence."""

import shutil
import sys
import types
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import errors

from models.errors import ModelLoadError
from models.loading.hub import (
    CONFIG_FILES,
    TOKENIZER_FILES,
    WEIGHT_FILES,
    HubAccess,
    is_hub_id,
    split_gguf_id,
)
from models.loading.safetensors import SafetensorsFolder
from models.loading.source import find_model, open_model
from tests.goldens_loader import GOLDENS_FOLDER
from tests.models.test_loading_gguf import checkpoint, split_model
from tests.models.test_loading_gguf import write as write_gguf

FOLDER = GOLDENS_FOLDER / "llama_gqa"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SECRET = "hf_abcdefghijkl"


def write_cache(cache: Path, files: Path, *, repository: str = "org/name") -> Path:
    """The Hub library's own layout: a snapshot of links to blobs, and a ref to the commit."""
    root = cache / f"models--{repository.replace('/', '--')}"
    snapshot = root / "snapshots" / COMMIT
    for folder in (snapshot, root / "blobs", root / "refs"):
        folder.mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    for number, path in enumerate(sorted(p for p in files.iterdir() if p.suffix != ".npz")):
        blob = root / "blobs" / f"{number:040x}"
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


class FakeHub:
    """Takes the place of snapshot_download; notes what it was asked for."""

    def __init__(self, monkeypatch, answer: Path | BaseException):
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._answer = answer
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self)

    def __call__(self, repository: str, **options: Any) -> str:
        self.calls.append((repository, options))
        if isinstance(self._answer, BaseException):
            raise self._answer
        return str(self._answer)


def http_error(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    request = httpx2.Request("GET", "https://huggingface.co/api/models/org/name")
    return kind("no\nsecond line", response=httpx2.Response(status, request=request))


def test_a_cached_repository_is_opened_without_network(tmp_path):
    snapshot = write_cache(tmp_path, FOLDER)
    opened = open_model("org/name", "auto", HubAccess(download_dir=str(tmp_path)))
    assert opened.path == snapshot
    wanted = dict(SafetensorsFolder(FOLDER).tensors())
    assert {name for name, _ in opened.source.tensors()} == set(wanted)
    assert opened.model_config().num_hidden_layers == 2


def test_a_commit_of_the_cache_is_opened_and_another_is_not(tmp_path):
    snapshot = write_cache(tmp_path, FOLDER)
    cached = HubAccess(download_dir=str(tmp_path), revision=COMMIT)
    assert find_model("org/name", cached) == snapshot
    other = HubAccess(download_dir=str(tmp_path), revision="v2")
    with pytest.raises(ModelLoadError, match="is not .wholly. in the cache while the Hub cannot"):
        find_model("org/name", other)


def test_a_link_of_the_cache_that_leaves_the_repository_is_refused(tmp_path):
    snapshot = write_cache(tmp_path, FOLDER)
    for name in ("model.safetensors", "config.json"):
        (snapshot / name).unlink()
        (snapshot / name).symlink_to(FOLDER / name)
        with pytest.raises(ModelLoadError, match=f"{name} must not link to a file outside"):
            open_model("org/name", "auto", HubAccess(download_dir=str(tmp_path)))
        (snapshot / name).unlink()
        shutil.copy(FOLDER / name, snapshot / name)


def test_without_network_and_copy_the_advice_is_to_look_at_both(tmp_path):
    access = HubAccess(download_dir=str(tmp_path))
    with pytest.raises(ModelLoadError) as caught:
        open_model("org/name", "auto", access)
    assert str(caught.value) == (
        "model must be a path that exists or the id of a repository; got 'org/name', which is not "
        "(wholly) in the cache while the Hub cannot be reached; check the network and "
        "HF_HUB_OFFLINE, or name a folder"
    )


def test_only_needed_files_are_asked_for_under_the_given_settings(monkeypatch):
    hub = FakeHub(monkeypatch, FOLDER)
    access = HubAccess(revision="v1", download_dir="/d", token=SECRET)
    open_model("org/name", "auto", access)
    ((repository, options),) = hub.calls
    assert repository == "org/name"
    assert options["allow_patterns"] == [*CONFIG_FILES, *TOKENIZER_FILES, *WEIGHT_FILES]
    assert (options["revision"], options["cache_dir"], options["token"]) == ("v1", "/d", SECRET)
    open_model("org/name", "dummy", access)
    assert not any("safetensors" in name for name in hub.calls[1][1]["allow_patterns"])


def test_the_patterns_take_what_is_needed_and_neither_code_nor_pickles_nor_copies(monkeypatch):
    hub = FakeHub(monkeypatch, FOLDER)
    open_model("org/name", "auto")
    options = hub.calls[0][1]
    repository = {
        "config.json": True,
        "generation_config.json": True,
        "model.safetensors": True,
        "model-00001-of-00002.safetensors": True,
        "model.safetensors.index.json": True,
        "tokenizer.json": True,
        "tokenizer_config.json": True,
        "chat_template.jinja": True,
        "additional_chat_templates/tool.jinja": True,
        "pytorch_model.bin": False,
        "modeling_x.py": False,
        "consolidated.safetensors": False,
        "original/model.safetensors": False,
        "onnx/model.onnx": False,
        "model.gguf": False,
        "README.md": False,
    }
    kept = huggingface_hub.utils.filter_repo_objects(
        repository,
        allow_patterns=options["allow_patterns"],
        ignore_patterns=options["ignore_patterns"],
    )
    assert set(kept) == {name for name, is_kept in repository.items() if is_kept}


REFUSED = {
    "gated": (http_error(errors.GatedRepoError, 403), "which is gated; accept its terms at https"),
    "private": (http_error(errors.RepositoryNotFoundError, 401), "give hf_token if it is private"),
    "disabled": (http_error(errors.DisabledRepoError, 403), "which the Hub has disabled"),
    "a full disk": (OSError(28, "No space left on device"), "No space left on device"),
    "a broken server": (http_error(errors.HfHubHTTPError, 500), "whose download failed"),
    "a token in the text": (RuntimeError(f"bad {SECRET}"), "(RuntimeError: bad ***)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_hub_refuses_is_told_in_one_sentence_without_the_token(monkeypatch, name):
    error, sentence = REFUSED[name]
    FakeHub(monkeypatch, error)
    with pytest.raises(ModelLoadError) as caught:
        find_model("org/name", HubAccess(token=SECRET))
    message = str(caught.value)
    assert message.startswith("model must be a path that exists or the id of a repository; got 'o")
    assert sentence in message and "\n" not in message and SECRET not in message


def test_an_unknown_revision_is_named(monkeypatch):
    FakeHub(monkeypatch, http_error(errors.RevisionNotFoundError, 404))
    with pytest.raises(ModelLoadError, match="^revision must be .* of org/name; got 'v9'$"):
        find_model("org/name", HubAccess(revision="v9"))


def test_a_token_is_not_shown():
    assert SECRET not in repr(HubAccess(token=SECRET))


def test_a_path_is_never_asked_of_the_hub(monkeypatch):
    hub = FakeHub(monkeypatch, AssertionError("asked"))
    find_model(str(FOLDER))
    for model in ("./no/such", "no.gguf", "/no/such", "a/b/c"):
        with pytest.raises(ModelLoadError):
            find_model(model)
    assert hub.calls == []


def test_one_gguf_file_of_a_repository_is_fetched(monkeypatch, tmp_path):
    write_gguf(tmp_path / "m-Q8_0.gguf", checkpoint())
    hub = FakeHub(monkeypatch, tmp_path)
    opened = open_model("org/name:m-Q8_0.gguf", "auto")
    assert opened.path == tmp_path / "m-Q8_0.gguf"
    assert hub.calls[0][0] == "org/name" and hub.calls[0][1]["allow_patterns"] == ["m-Q8_0.gguf"]
    with pytest.raises(ModelLoadError, match="^org/name must hold the file x.gguf; it does not"):
        find_model("org/name:x.gguf")


def test_all_parts_of_a_split_gguf_file_are_fetched(monkeypatch, tmp_path):
    first = split_model(tmp_path)
    hub = FakeHub(monkeypatch, tmp_path)
    opened = open_model(f"org/name:{first.name}", "auto")
    assert len(list(opened.source.tensors())) == opened.source.num_tensors
    assert hub.calls[0][1]["allow_patterns"] == ["m-*-of-00002.gguf"]


@pytest.mark.parametrize("text", ["gpt2", "org/name", "Qwen/Qwen3-0.6B", "a_b/c.d-e", "0/1"])
def test_ids_of_repositories(text):
    assert is_hub_id(text)
    huggingface_hub.utils.validate_repo_id(text)
    assert split_gguf_id(f"{text}:q4/m.gguf") == (text, "q4/m.gguf")


@pytest.mark.parametrize(
    "text", ["", "a/b/c", "-a", "a-", "a--b", "a..b", "a b", "a.git", "x" * 97]
)
def test_what_is_no_id_of_a_repository(text):
    assert not is_hub_id(text)
    with pytest.raises(errors.HFValidationError):
        huggingface_hub.utils.validate_repo_id(text)


def test_modelscope_is_asked_instead_where_it_is_wanted(monkeypatch):
    hub = FakeHub(monkeypatch, AssertionError("asked"))
    module, calls = types.ModuleType("modelscope"), []

    def snapshot_download(repository: str, **options: Any) -> str:
        calls.append((repository, options))
        if repository == "org/none":
            raise ValueError("404\nmore")
        return str(FOLDER)

    module.snapshot_download = snapshot_download  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "modelscope", module)
    access = HubAccess(use_modelscope=True, revision="v1", download_dir="/d", token=SECRET)
    assert open_model("org/name", "auto", access).path == FOLDER
    ((repository, options),) = calls
    assert repository == "org/name" and "model.safetensors" not in options["ignore_patterns"]
    assert (options["revision"], options["cache_dir"]) == ("v1", "/d")
    assert SECRET not in str(options) and hub.calls == []
    with pytest.raises(ModelLoadError, match=r"'org/none', which ModelScope did not give \(Value"):
        find_model("org/none", access)


def test_a_missing_modelscope_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(
        ModelLoadError, match=r"^the package modelscope must be installed .*jaxserve"
    ):
        find_model("org/name", HubAccess(use_modelscope=True))
