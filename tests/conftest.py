"""Settings of all tests: the CPU unless told otherwise, no hub, compiled programs kept on disk.

All stand in the environment before jax is first imported, so that they reach the workers of
pytest-xdist and the processes that tests start. `JAX_PLATFORMS=cuda` runs tests on the GPU.
"""

import os
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(REPOSITORY / ".cache" / "jax"))
# Threads of XLA's pool, whatever the machine has: an interpreted kernel's warpgroups wait for each
# other in it, and two of them on a pool of two could wait for ever.
os.environ.setdefault("NPROC", "16")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
