"""What JAX is told, and what is refused of a device, before a model is loaded."""

import os
from dataclasses import dataclass

import pytest
from safetensors.numpy import load_file

from jaxserve import engine_builder
from jaxserve.config import EngineConfig
from jaxserve.errors import EngineConfigError
from jaxserve.execution import device_setup
from jaxserve.execution.device_setup import (
    PINNED_LIMIT,
    check_memory_pool,
    check_pinned_memory,
    configure_jax,
)
from jaxserve.processing.model_files import open_configured_model
from tests.goldens_loader import GOLDENS_FOLDER

GIB = 2**30


@dataclass
class Device:
    """A device as far as it is asked."""

    limit: int
    pool: int | None
    id: int = 0
    device_kind: str = "NVIDIA H200"

    def memory_stats(self) -> dict[str, int] | None:
        if self.pool is None:
            return None
        return {"bytes_limit": self.limit, "pool_bytes": self.pool}


def test_a_pool_that_is_smaller_than_asked_for_is_refused_with_both_sizes():
    devices = [Device(100 * GIB, 100 * GIB), Device(100 * GIB, 35 * GIB, id=1)]
    with pytest.raises(EngineConfigError, match=r"H200 1 must have 100\.0 GiB .* got 35\.0 GiB"):
        check_memory_pool(devices)


@pytest.mark.parametrize("pool", [None, 0, 100 * GIB])
def test_whole_pools_and_devices_that_do_not_tell_are_taken(pool):
    check_memory_pool([Device(100 * GIB, pool)])


def test_a_pool_that_is_meant_to_grow_is_taken(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    check_memory_pool([Device(100 * GIB, GIB)])


@pytest.mark.parametrize(
    ("given", "pinned_gib", "limit"),
    [(None, 62, None), (None, 62.5, None), (None, 63, "65"), (None, 200, "202"), ("80", 200, "80")],
)
def test_xla_may_pin_what_is_needed_unless_the_user_says_otherwise(
    monkeypatch, tmp_path, given, pinned_gib, limit
):
    monkeypatch.setattr(device_setup, "_backend_runs", lambda: False)
    monkeypatch.setattr(device_setup, "_is_usable", lambda folder: False)
    environment = {} if given is None else {PINNED_LIMIT: given}
    monkeypatch.setattr(os, "environ", environment)
    configure_jax(
        gpu_memory_utilization=0.5,
        pinned_bytes=int(pinned_gib * GIB),
        compilation_cache_dir=str(tmp_path),
    )
    assert environment.get(PINNED_LIMIT) == limit
    assert environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5000"


def test_where_jax_runs_the_limit_is_as_it_is_and_more_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(device_setup, "_backend_runs", lambda: True)
    monkeypatch.setattr(device_setup, "_is_usable", lambda folder: False)
    monkeypatch.setattr(os, "environ", {})
    configure_jax(
        gpu_memory_utilization=0.5, pinned_bytes=200 * GIB, compilation_cache_dir=str(tmp_path)
    )
    assert not os.environ
    check_pinned_memory(63 * GIB)
    rule = r"^kv_offloading_size must be at most 63 GiB for each GPU, one less .* got 64.00 "
    with pytest.raises(EngineConfigError, match=rule):
        check_pinned_memory(64 * GIB)
    monkeypatch.setenv(PINNED_LIMIT, "65")
    check_pinned_memory(64 * GIB)


@pytest.mark.parametrize(("dtype", "size"), [("auto", 2), ("float32", 4)])
def test_a_start_asks_for_the_host_tier_and_the_weights_of_a_device(monkeypatch, dtype, size):
    class Stop(Exception):
        """Ends the start before it takes a device."""

    asked = {}

    def note(**arguments) -> None:
        asked.update(arguments)
        raise Stop

    monkeypatch.setattr(engine_builder, "configure_jax", note)
    folder = GOLDENS_FOLDER / "llama_gqa"
    config = EngineConfig(
        model=str(folder), dtype=dtype, kv_offloading_size=0.5, tensor_parallel_size=2
    )
    with pytest.raises(Stop):
        engine_builder.set_up(config, open_configured_model(config))
    num_weights = sum(array.size for array in load_file(folder / "model.safetensors").values())
    assert asked["pinned_bytes"] == (GIB // 2 + size * num_weights) // 2
