"""The sampling parameters of requests without any: the model's generation_config.json."""

from pathlib import Path
from typing import Any

from jaxserve.errors import EngineConfigError, InvalidRequestError
from jaxserve.sampling_params import SamplingParams
from models.errors import ModelLoadError
from models.loading.strict_json import read_json_object

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_FILE = "generation_config.json"


def read_default_sampling(generation_config: str, model_path: Path) -> SamplingParams:
    """The defaults that `EngineConfig.generation_config` asks for.

    Args:
      generation_config: "auto" for the model's, "vllm" for none, or a folder with the file.
      model_path: folder or file of the model.

    Raises:
      EngineConfigError: the folder lacks the file.
      ModelLoadError: the file is malformed, or a value breaks its rule.
    """
    folder = model_path if generation_config == "auto" else Path(generation_config).expanduser()
    path = folder / _FILE
    if generation_config == "vllm" or (generation_config == "auto" and not path.is_file()):
        return SamplingParams()
    if not path.is_file():
        raise EngineConfigError(
            f"generation_config must be auto, vllm or a folder with {_FILE}; "
            f"got {generation_config!r}"
        )
    values = read_json_object(path)
    fields: dict[str, Any] = {name: values.get(name) for name in _FIELDS}
    max_tokens = values.get("max_new_tokens")
    if max_tokens is not None:
        fields["max_tokens"] = max_tokens
    try:
        return SamplingParams.from_optional(**fields)
    except InvalidRequestError as error:
        raise ModelLoadError(f"{path}: {error}") from error
