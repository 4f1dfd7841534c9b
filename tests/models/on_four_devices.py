"""Runs a module of findings in a process that has four virtual CPU devices."""

import json
import os
import subprocess
import sys
from typing import Any

from tests.conftest import REPOSITORY

FLAGS = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"


def findings_of(module: str, *, timeout: float) -> dict[str, Any]:
    """The JSON that the module prints.

    Args:
      module: its name.
      timeout: seconds that it may take.
    """
    environment = os.environ | {"XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", module]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
