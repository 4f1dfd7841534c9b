"""The face of jaxserve for its users; each name is imported when it is first asked for.

So `import jaxserve` stays light: JAX, Flax and transformers are loaded only by what needs them.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.async_llm_engine import AsyncLLMEngine
    from jaxserve.config import EngineConfig
    from jaxserve.config import EngineConfig as AsyncEngineArgs
    from jaxserve.config import EngineConfig as EngineArgs
    from jaxserve.errors import InvalidRequestError, VLLMValidationError
    from jaxserve.llm import LLM
    from jaxserve.outputs import CompletionOutput, RequestOutput
    from jaxserve.sampling_params import BeamSearchParams, SamplingParams

    __version__: str

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineArgs",
    "EngineConfig",
    "InvalidRequestError",
    "RequestOutput",
    "SamplingParams",
    "VLLMValidationError",
    "__version__",
]

_HOMES = {
    "LLM": ("jaxserve.llm", "LLM"),
    "AsyncEngineArgs": ("jaxserve.config", "EngineConfig"),
    "AsyncLLMEngine": ("jaxserve.async_llm_engine", "AsyncLLMEngine"),
    "BeamSearchParams": ("jaxserve.sampling_params", "BeamSearchParams"),
    "CompletionOutput": ("jaxserve.outputs", "CompletionOutput"),
    "EngineArgs": ("jaxserve.config", "EngineConfig"),
    "EngineConfig": ("jaxserve.config", "EngineConfig"),
    "InvalidRequestError": ("jaxserve.errors", "InvalidRequestError"),
    "RequestOutput": ("jaxserve.outputs", "RequestOutput"),
    "SamplingParams": ("jaxserve.sampling_params", "SamplingParams"),
    "VLLMValidationError": ("jaxserve.errors", "VLLMValidationError"),
}


def _find_version() -> str:
    try:
        return importlib.metadata.version("jaxserve")
    except importlib.metadata.PackageNotFoundError:  # run from the source tree
        return "0+uninstalled"


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = _find_version()
    elif name in _HOMES:
        module, attribute = _HOMES[name]
        value = getattr(importlib.import_module(module), attribute)
    else:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
