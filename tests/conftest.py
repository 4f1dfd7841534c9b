"""Settings of all tests: the CPU unless told otherwise, no hub, compiled programs kept on disk.

All stand in the environment before jax is first imported, so that they reach the workers of
pytest-xdist and the processes that tests start. `JAX_PLATFORMS=cuda` runs tests on the GPU.
"""

import gc
import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(REPOSITORY / ".cache" / "jax"))
# Threads of XLA's pool, whatever the machine has: an interpreted kernel's warpgroups wait for each
# other in it, and two of them on a pool of two could wait for ever.
os.environ.setdefault("NPROC", "16")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
if os.environ["JAX_PLATFORMS"] == "cpu":
    # A cold run is mostly XLA's work, on programs that tests then run a few times only.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# Else each process that a test starts would parse all of JAX anew, 2 s each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The notebook comes first: last, it would keep one worker busy when all others are done."""
    items.sort(key=lambda item: item.path.name != "test_notebooks.py")


def pytest_collection_finish() -> None:
    """Spare the garbage collector what was imported; compiling makes it run often."""
    gc.collect()
    gc.freeze()
