"""The version of attention follows the device, and an impossible wish is refused."""

import sys
from types import ModuleType

import pytest

from pallas_kernels import platform
from pallas_kernels.platform import AssumedGpu, assume_gpu, choose_attention_backend


@pytest.fixture
def has_jax_triton(monkeypatch):
    """Both packages can be imported."""
    for name in ("triton", "jax_triton"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


@pytest.fixture
def has_no_jax_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "jax_triton", None)


CHOICES = [
    ("9.0", "mosaic"),
    ("8.0", "triton"),
    ("8.9", "triton"),
    ("12.0", "triton"),
    ("7.5", "xla"),
    (None, "xla"),
]


@pytest.mark.parametrize(("capability", "chosen"), CHOICES)
def test_each_capability_gets_its_version(monkeypatch, has_jax_triton, capability, chosen):
    monkeypatch.setattr(platform, "gpu_capability", lambda: capability)
    assert choose_attention_backend() == chosen
    assert choose_attention_backend("xla") == "xla"


@pytest.mark.parametrize("capability", ["8.6", "9.0"])
def test_triton_can_be_asked_for_from_capability_eight_on(monkeypatch, has_jax_triton, capability):
    monkeypatch.setattr(platform, "gpu_capability", lambda: capability)
    assert choose_attention_backend("triton") == "triton"


def test_without_jax_triton_it_falls_to_xla_with_a_warning(monkeypatch, has_no_jax_triton, caplog):
    monkeypatch.setattr(platform, "gpu_capability", lambda: "8.6")
    assert choose_attention_backend() == "xla"
    assert "attention by xla, which is slow on a GPU" in caplog.text
    assert "pip install 'jax-triton" in caplog.text


def test_without_jax_triton_a_wish_for_it_is_refused(monkeypatch, has_no_jax_triton):
    monkeypatch.setattr(platform, "gpu_capability", lambda: "8.6")
    with pytest.raises(ValueError, match="must have jax-triton .*; install them: pip install"):
        choose_attention_backend("triton")


def test_mosaic_without_the_device_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "gpu_capability", lambda: "8.0")
    with pytest.raises(ValueError, match="capability 9.0; got capability 8.0; use xla"):
        choose_attention_backend("mosaic")


@pytest.mark.parametrize(("capability", "found"), [("7.5", "capability 7.5"), (None, "no NVIDIA")])
def test_triton_without_the_device_is_refused(monkeypatch, capability, found):
    monkeypatch.setattr(platform, "gpu_capability", lambda: capability)
    with pytest.raises(ValueError, match=f"capability 8.0 or above; got {found}"):
        choose_attention_backend("triton")


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="must be mosaic, triton or xla; got 'cuda'"):
        choose_attention_backend("cuda")


def test_a_cpu_has_no_capability():
    if platform.jax.default_backend() != "cpu":
        pytest.skip("the default device is no CPU")
    assert platform.gpu_capability() is None
    assert platform.gpu_kind() is None


def test_an_assumed_gpu_stands_for_the_device_until_it_is_given_up():
    assert platform.default_backend() == "cpu" and platform.gpu_kind() is None
    assume_gpu(AssumedGpu("NVIDIA H200", "9.0"))
    try:
        assert platform.default_backend() == "gpu" and platform.gpu_kind() == "NVIDIA H200"
        assert choose_attention_backend() == "mosaic"
    finally:
        assume_gpu(None)
    assert platform.default_backend() == "cpu" and choose_attention_backend() == "xla"
