"""Models and tokenizers are found by path, by hub id and by revision, or refused."""

import os
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import EngineConfigError, ModelLoadError
from jaxserve.llm import LLM
from jaxserve.processing.model_files import (
    load_configured_tokenizer,
    localize,
    open_configured_model,
)
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.tokenizer import Tokenizer
from models.loading.hub import TOKENIZER_FILES
from tests.models.test_hub import COMMIT, write_cache
from tests.tiny_llm import GOLDEN, MODEL, SETTINGS, to_text, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A whole model: weights, config and tokenizer."""
    path = tmp_path_factory.mktemp("model")
    write_tokenizer(path)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(MODEL) / name, path)
    return path


class Hub:
    """Takes the place of snapshot_download: each repository is a folder."""

    def __init__(self, monkeypatch, folders: dict[str, Path]):
        self.calls: list[tuple[str, Any, Any]] = []
        self._folders = folders
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self)

    def __call__(self, repository: str, **options: Any) -> str:
        self.calls.append((repository, options["revision"], options["allow_patterns"]))
        assert options["token"] == "hf_x"
        return str(self._folders[repository])


def tokenizer_of(**settings: Any) -> Tokenizer:
    config = EngineConfig(hf_token="hf_x", **settings)
    return load_configured_tokenizer(config, open_configured_model(config))


def test_the_tokenizer_of_a_repository_is_taken_from_the_model_s_snapshot(monkeypatch, folder):
    hub = Hub(monkeypatch, {"org/model": folder})
    assert tokenizer_of(model="org/model", revision="v1").encode("w7 w8") == [7, 8]
    assert tokenizer_of(model="org/model", tokenizer="org/model").encode("w7") == [7]
    assert [call[:2] for call in hub.calls] == [("org/model", "v1"), ("org/model", None)]


def test_another_repository_s_tokenizer_is_fetched_without_its_weights(monkeypatch, folder):
    hub = Hub(monkeypatch, {"org/tokens": folder})
    made = tokenizer_of(model=MODEL, tokenizer="org/tokens", tokenizer_revision="v2")
    assert made.encode("w7") == [7]
    assert hub.calls == [("org/tokens", "v2", list(TOKENIZER_FILES))]


def test_the_model_s_tokenizer_may_be_of_another_revision(monkeypatch, folder):
    hub = Hub(monkeypatch, {"org/model": folder})
    tokenizer_of(model="org/model", revision="v1", tokenizer_revision="v2")
    assert [call[1] for call in hub.calls] == ["v1", "v2"]


@pytest.mark.parametrize("tokenizer", [None, "a folder"])
def test_a_tokenizer_revision_of_a_path_is_refused(folder, tokenizer):
    name = None if tokenizer is None else str(folder)
    with pytest.raises(EngineConfigError, match="^tokenizer_revision must be given with the hub"):
        tokenizer_of(model=MODEL, tokenizer=name, tokenizer_revision="v2")


def test_a_tokenizer_may_be_a_folder_or_its_tokenizer_json(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    for name in (str(folder), str(folder / "tokenizer.json"), f"~/{folder.name}"):
        tokenizer = tokenizer_of(model=MODEL, tokenizer=name)
        assert tokenizer.encode("w7") == [7] and tokenizer.chat_template is not None


@pytest.mark.parametrize("name", ["./no", "/no/tokenizer.json", "a/b/c", ""])
def test_a_tokenizer_that_is_nowhere_is_named(name):
    with pytest.raises(ModelLoadError, match=f"^tokenizer must be a path that .*; got {name!r}$"):
        tokenizer_of(model=MODEL, tokenizer=name)


def test_a_model_without_tokenizer_tells_what_to_do():
    with pytest.raises(ModelLoadError, match="name one as tokenizer, or set skip_tokenizer_init"):
        tokenizer_of(model=MODEL)


def test_trust_remote_code_is_taken_with_one_warning(folder):
    config = EngineConfig(model=str(folder), trust_remote_code=True)
    with pytest.warns(UserWarning, match="trust_remote_code has no effect: code of") as caught:
        open_configured_model(config)
    assert len(caught) == 1


def test_another_process_gets_the_path_and_no_token(tmp_path, folder):
    snapshot = write_cache(tmp_path, folder)
    config = EngineConfig(
        model="org/name", revision=COMMIT, download_dir=str(tmp_path), hf_token="hf_x", seed=3
    )
    there = localize(config, open_configured_model(config))
    assert (there.model, there.revision, there.hf_token) == (str(snapshot), None, None)
    assert there.seed == 3 and open_configured_model(there).path == snapshot


def test_an_engine_answers_from_a_cached_repository(tmp_path, folder):
    write_cache(tmp_path, folder)
    llm = LLM("org/name", download_dir=tmp_path, served_model_name="n", **SETTINGS)
    assert llm.config.served_model_name == ("n",)
    prompt, tokens = GOLDEN.alone.prompt, GOLDEN.alone.tokens
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    (output,) = llm.generate({"prompt": to_text(prompt)}, params, use_tqdm=False)
    assert tuple(output.outputs[0].token_ids) == tokens[:4]


def test_every_way_to_name_a_model_reaches_the_same_files(tmp_path, folder, monkeypatch):
    """As far as the engine: it is not built."""
    seen = []
    monkeypatch.setattr(
        "jaxserve.processing.front_end.FrontEnd.open", lambda config: seen.append(config)
    )
    monkeypatch.setattr("jaxserve.engine_builder.build_engine", None)
    monkeypatch.setenv("HOME", str(folder.parent))
    write_cache(tmp_path, folder)
    for model in (folder, str(folder), f"~/{folder.name}", os.path.relpath(folder), "org/name"):
        with pytest.raises((AttributeError, TypeError)):
            LLM(model, download_dir=tmp_path)
    contents = {
        (opened := open_configured_model(config)).source.num_tensors: opened.model_config()
        for config in seen
    }
    assert len(seen) == 5 and len(contents) == 1
