"""Tests that the face of jaxserve stays light and that each of its names resolves."""

import importlib.util
import subprocess
import sys

import pytest

import jaxserve

HEAVY = ("jax", "jaxlib", "flax", "transformers", "torch")
LIGHT = [
    "jaxserve",
    "jaxserve.config",
    "jaxserve.errors",
    "jaxserve.sampling_params",
    "jaxserve.processing.sampling_limits",
    "jaxserve.request",
    "jaxserve.step",
    "jaxserve.outputs",
    "jaxserve.processing.output_processor",
]


def test_light_modules_load_no_heavy_one():
    found = [name for name in LIGHT if importlib.util.find_spec(name) is not None]
    assert {"jaxserve", "jaxserve.sampling_params", "jaxserve.outputs"} <= set(found)
    script = (
        f"import importlib, sys\n"
        f"for name in {found!r}:\n"
        f"    importlib.import_module(name)\n"
        f"    heavy = sorted(set({HEAVY!r}) & set(sys.modules))\n"
        f"    assert not heavy, f'{{name}} imports {{heavy}}'\n"
        f"from jaxserve import SamplingParams, RequestOutput, InvalidRequestError, __version__\n"
        f"assert not set({HEAVY!r}) & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_names_of_the_face_are_those_of_the_defining_modules():
    from jaxserve.errors import InvalidRequestError
    from jaxserve.outputs import CompletionOutput, RequestOutput
    from jaxserve.sampling_params import BeamSearchParams, SamplingParams

    assert jaxserve.SamplingParams is SamplingParams
    assert jaxserve.BeamSearchParams is BeamSearchParams
    assert jaxserve.RequestOutput is RequestOutput
    assert jaxserve.CompletionOutput is CompletionOutput
    assert jaxserve.InvalidRequestError is InvalidRequestError
    assert jaxserve.VLLMValidationError is InvalidRequestError


@pytest.mark.parametrize("name", jaxserve.__all__)
def test_every_public_name_whose_module_exists_resolves(name):
    module, _ = jaxserve._HOMES.get(name, ("jaxserve", name))
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not written yet")
    assert getattr(jaxserve, name) is not None
    assert name in dir(jaxserve)


def test_engine_args_is_vllms_name_of_engine_config():
    assert jaxserve._HOMES["EngineArgs"] == jaxserve._HOMES["EngineConfig"]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        jaxserve.Nothing  # noqa: B018
    with pytest.raises(ImportError, match="Nothing"):
        exec("from jaxserve import Nothing")


def test_the_version_is_a_string_of_digits_first():
    assert jaxserve.__version__[0].isdigit()
