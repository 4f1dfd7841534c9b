"""The environment variables that become settings; read where a user comes in, nowhere deeper."""

import os
from collections.abc import Mapping
from typing import Any

_SWITCHES = {
    "VLLM_USE_MODELSCOPE": "use_modelscope",
    "VLLM_BATCH_INVARIANT": "batch_invariant",
}
"""vLLM's variables, and the fields of EngineConfig that they turn on by "true" or "1"."""


def environment_settings(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Fields of EngineConfig that variables set; what the user gives himself wins over them."""
    return {
        field: True
        for variable, field in _SWITCHES.items()
        if environment.get(variable, "").lower() in ("true", "1")
    }
