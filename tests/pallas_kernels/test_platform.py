"""The version of attention follows the device, and an impossible wish is refused."""

import pytest

from pallas_kernels import platform
from pallas_kernels.platform import choose_attention_backend


@pytest.mark.parametrize(
    ("capability", "chosen"), [("9.0", "mosaic"), ("10.0", "xla"), ("8.0", "xla"), (None, "xla")]
)
def test_only_capability_nine_runs_mosaic(monkeypatch, capability, chosen):
    monkeypatch.setattr(platform, "gpu_capability", lambda: capability)
    assert choose_attention_backend() == chosen
    assert choose_attention_backend("xla") == "xla"


def test_mosaic_without_the_device_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "gpu_capability", lambda: "8.0")
    with pytest.raises(ValueError, match="capability 9.0; got capability 8.0; use xla"):
        choose_attention_backend("mosaic")


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="must be mosaic or xla; got 'cuda'"):
        choose_attention_backend("cuda")


def test_a_cpu_has_no_capability():
    if platform.jax.default_backend() != "cpu":
        pytest.skip("the default device is no CPU")
    assert platform.gpu_capability() is None
    assert platform.gpu_kind() is None
