"""Tests of jaxserve/processing/default_sampling.py."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import EngineConfigError, ModelLoadError
from jaxserve.loading_config import LoadingConfig
from jaxserve.processing.default_sampling import read_generation_defaults
from jaxserve.sampling_params import SamplingParams

FILE: dict[str, Any] = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.1,
    "repetition_penalty": 1.05,
    "max_new_tokens": 99,
    "eos_token_id": [7, 8],
    "do_sample": True,
    "transformers_version": "5",
}
OF_FILE = SamplingParams(
    temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.05, max_tokens=99
)


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "generation_config.json").write_text(json.dumps(FILE))
    return tmp_path


def test_auto_reads_the_file_of_the_model(folder):
    defaults = read_generation_defaults(LoadingConfig(), folder)
    assert (defaults.params, defaults.eos_token_ids) == (OF_FILE, (7, 8))


def test_another_folder_is_read_instead(folder, tmp_path_factory):
    config = LoadingConfig(generation_config=str(folder))
    defaults = read_generation_defaults(config, tmp_path_factory.mktemp("model"))
    assert defaults.params == OF_FILE


@pytest.mark.parametrize("kind", ["auto without a file", "vllm", "a GGUF file"])
def test_without_a_file_the_defaults_are_those_of_vllm(folder, tmp_path_factory, kind):
    path = {"vllm": folder, "a GGUF file": folder / "m.gguf"}.get(kind)
    path = path or tmp_path_factory.mktemp("model")
    config = LoadingConfig(generation_config="vllm" if kind == "vllm" else "auto")
    defaults = read_generation_defaults(config, path)
    assert (defaults.params, defaults.eos_token_ids) == (SamplingParams(), ())


def test_a_null_is_the_same_as_no_value(tmp_path):
    text = json.dumps(dict.fromkeys(FILE))
    (tmp_path / "generation_config.json").write_text(text)
    defaults = read_generation_defaults(LoadingConfig(), tmp_path)
    assert (defaults.params, defaults.eos_token_ids) == (SamplingParams(), ())


WRONG: dict[str, list[Any]] = {
    "temperature": ["hot", True, -1, [0.5], {}],
    "top_p": ["0.9", 0, 2, False],
    "top_k": [1.5, "5", -2],
    "min_p": ["0", 2],
    "repetition_penalty": [0, "1", [1.0]],
    "max_new_tokens": [0, 1.5, "9", True],
    "eos_token_id": ["7", -1, 1.0, [7, "8"], True, {}],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_value_of_a_wrong_type_or_size_is_refused_with_file_and_name(folder, name):
    shown = "max_tokens" if name == "max_new_tokens" else name
    for value in WRONG[name]:
        path = folder / "generation_config.json"
        path.write_text(json.dumps(FILE | {name: value}))
        with pytest.raises(ModelLoadError, match=f"generation_config.json: {shown} must"):
            read_generation_defaults(LoadingConfig(), folder)
        config = LoadingConfig(generation_config="vllm", override_generation_config={name: value})
        with pytest.raises(EngineConfigError, match=f"override_generation_config: {shown} must"):
            read_generation_defaults(config, folder)


def test_overrides_win_over_the_file_and_hold_without_it(folder):
    override = {"temperature": 0.0, "eos_token_id": 9}
    config = LoadingConfig(override_generation_config=override)
    defaults = read_generation_defaults(config, folder)
    assert (defaults.params.temperature, defaults.params.max_tokens) == (0.0, 99)
    assert defaults.eos_token_ids == (9,)
    alone = LoadingConfig(generation_config="vllm", override_generation_config=override)
    assert read_generation_defaults(alone, folder).params == SamplingParams(temperature=0.0)


def test_an_override_that_nobody_reads_is_refused(folder):
    config = LoadingConfig(override_generation_config={"do_sample": False})
    with pytest.raises(EngineConfigError, match="must hold only temperature, .*; got 'do_sample'"):
        read_generation_defaults(config, folder)


def test_a_folder_without_the_file_is_refused(tmp_path):
    config = LoadingConfig(generation_config=str(tmp_path))
    with pytest.raises(EngineConfigError, match="must be auto, vllm or a folder with generation_"):
        read_generation_defaults(config, tmp_path)


def test_a_link_that_leaves_the_model_is_refused(folder, tmp_path_factory):
    model = tmp_path_factory.mktemp("model")
    (model / "generation_config.json").symlink_to(folder / "generation_config.json")
    with pytest.raises(ModelLoadError, match="must not link to a file outside"):
        read_generation_defaults(LoadingConfig(), model)


def test_a_file_cut_anywhere_is_refused(folder):
    path = folder / "generation_config.json"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match="generation_config.json must be"):
            read_generation_defaults(LoadingConfig(), folder)
