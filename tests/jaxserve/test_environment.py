"""Tests of jaxserve/environment.py and of the constructor that asks it."""

import sys

import pytest

from jaxserve.environment import environment_settings
from jaxserve.errors import ModelLoadError
from jaxserve.llm import LLM


@pytest.mark.parametrize("value", ["true", "True", "1"])
def test_a_variable_of_vllm_becomes_a_setting(value):
    assert environment_settings({"VLLM_USE_MODELSCOPE": value}) == {"use_modelscope": True}
    assert environment_settings({"VLLM_BATCH_INVARIANT": value}) == {"batch_invariant": True}


@pytest.mark.parametrize("value", ["", "false", "0", "no"])
def test_a_variable_that_asks_nothing_sets_nothing(value):
    assert environment_settings({"VLLM_USE_MODELSCOPE": value}) == {}
    assert environment_settings({"VLLM_BATCH_INVARIANT": value}) == {}
    assert environment_settings({}) == {}


def test_the_constructor_asks_and_an_argument_wins(monkeypatch):
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "true")
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ModelLoadError, match="the package modelscope must be installed"):
        LLM("org/name")
    with pytest.raises(ModelLoadError, match="in the cache while the Hub cannot be reached"):
        LLM("org/name", use_modelscope=False)
