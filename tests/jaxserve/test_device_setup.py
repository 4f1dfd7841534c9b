"""What JAX is told, and what is refused of a device, before a model is loaded."""

from dataclasses import dataclass

import pytest

from jaxserve.errors import EngineConfigError
from jaxserve.execution.device_setup import check_memory_pool

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
