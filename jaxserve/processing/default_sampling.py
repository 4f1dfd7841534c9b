"""What the model's generation_config.json says of requests: sampling parameters and end ids."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.errors import EngineConfigError, InvalidRequestError
from jaxserve.loading_config import LoadingConfig
from jaxserve.sampling_params import SamplingParams
from models.errors import ModelLoadError
from models.loading.model_paths import check_inside
from models.loading.strict_json import read_json_object
from models.typed_config import TypedConfig

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_KNOWN = (*_SAMPLING, "max_new_tokens", "eos_token_id")
_FILE = "generation_config.json"
_OVERRIDE = "override_generation_config"


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What holds for requests that say nothing themselves.

    Attributes:
      params: of requests without any.
      eos_token_ids: ids that end a sequence, beside those of the model and its tokenizer.
    """

    params: SamplingParams
    eos_token_ids: tuple[int, ...]


def read_generation_defaults(config: LoadingConfig, model_path: Path) -> GenerationDefaults:
    """The defaults that `generation_config` and `override_generation_config` ask for.

    Keys that only transformers reads, such as do_sample, are left aside, as in vLLM; in
    `override_generation_config` they are refused.

    Args:
      config: the settings.
      model_path: folder or file of the model.

    Raises:
      EngineConfigError: the folder lacks the file, or an override is not known or breaks its rule.
      ModelLoadError: the file is malformed, or a value breaks its rule.
    """
    path = _find_file(config.generation_config, model_path)
    values = {} if path is None else read_json_object(path)
    try:
        defaults = _read(values, str(path))
    except InvalidRequestError as error:
        raise ModelLoadError(f"{path}: {error}") from error
    if not config.override_generation_config:
        return defaults
    try:
        return _read(values | _checked(config.override_generation_config), _OVERRIDE)
    except InvalidRequestError as error:
        raise EngineConfigError(f"{_OVERRIDE}: {error}") from error
    except ModelLoadError as error:
        raise EngineConfigError(str(error)) from error


def _find_file(generation_config: str, model_path: Path) -> Path | None:
    if generation_config == "vllm":
        return None
    if generation_config == "auto":
        path = model_path / _FILE
        if not path.is_file():
            return None
        check_inside(path, model_path)
        return path
    path = Path(generation_config).expanduser() / _FILE
    if not path.is_file():
        raise EngineConfigError(
            f"generation_config must be auto, vllm or a folder with {_FILE}; "
            f"got {generation_config!r}"
        )
    return path


def _checked(override: dict[str, Any]) -> dict[str, Any]:
    for name in override:
        if name not in _KNOWN:
            raise EngineConfigError(f"{_OVERRIDE} must hold only {', '.join(_KNOWN)}; got {name!r}")
    return override


def _read(values: Mapping[str, Any], source: str) -> GenerationDefaults:
    fields: dict[str, Any] = {name: values.get(name) for name in _SAMPLING}
    max_tokens = values.get("max_new_tokens")
    if max_tokens is not None:
        fields["max_tokens"] = max_tokens
    return GenerationDefaults(
        SamplingParams.from_optional(**fields),
        TypedConfig(values, source).token_ids("eos_token_id"),
    )
