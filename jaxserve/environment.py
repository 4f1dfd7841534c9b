"""The environment variables that become settings; read where a user comes in, nowhere deeper."""

import os
from collections.abc import Mapping
from typing import Any


def environment_settings(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Fields of EngineConfig that variables set; what the user gives himself wins over them.

    VLLM_USE_MODELSCOPE: "true" or "1" sets `use_modelscope`.
    """
    is_set = environment.get("VLLM_USE_MODELSCOPE", "").lower() in ("true", "1")
    return {"use_modelscope": True} if is_set else {}
