"""Opens the model and the tokenizer that an EngineConfig names; no JAX."""

import dataclasses
import warnings
from pathlib import Path

from jaxserve.config import EngineConfig
from jaxserve.errors import EngineConfigError
from jaxserve.loading_config import LoadingConfig
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from models.errors import ModelLoadError
from models.loading.hub import TOKENIZER_FILES, HubAccess, is_hub_id
from models.loading.model_paths import is_there
from models.loading.source import OpenedModel, find_model, open_model


def open_configured_model(config: LoadingConfig) -> OpenedModel:
    """Find the model, download what is missing of it, and open it.

    Raises:
      ModelLoadError: the model is not found, or its files are refused.
    """
    if config.trust_remote_code:
        warnings.warn("trust_remote_code has no effect: code of a model is never run", stacklevel=3)
    return open_model(config.model, config.load_format, _access(config))


def load_configured_tokenizer(config: LoadingConfig, opened: OpenedModel) -> Tokenizer:
    """The tokenizer that the settings name, else the model's own.

    Raises:
      ModelLoadError: it is not found, or its files are refused.
      EngineConfigError: a `tokenizer_revision` where the tokenizer comes from no repository.
    """
    path = _find_tokenizer(config, opened)
    try:
        return load_tokenizer(path)
    except ModelLoadError as error:
        if config.tokenizer is not None:
            raise
        raise ModelLoadError(
            f"{error}; name one as tokenizer, or set skip_tokenizer_init to give token ids only"
        ) from error


def localize(config: EngineConfig, opened: OpenedModel) -> EngineConfig:
    """The settings with the opened model's path in place of its hub id, and without the token.

    For another process of the same engine, which must load the same files.
    """
    return dataclasses.replace(config, model=str(opened.path), revision=None, hf_token=None)


def _find_tokenizer(config: LoadingConfig, opened: OpenedModel) -> Path:
    name, revision = config.tokenizer, config.tokenizer_revision
    if name is None and revision is not None:
        name = config.model
    if name is None:
        return opened.path
    is_path = is_there(Path(name).expanduser())
    if revision is not None and (is_path or not is_hub_id(name)):
        raise EngineConfigError(
            f"tokenizer_revision must be given with the hub id of a tokenizer or model; "
            f"got {revision!r} with {name!r}"
        )
    if revision is None and not is_path and name == config.model:
        return opened.path
    access = dataclasses.replace(_access(config), revision=revision, argument="tokenizer")
    return find_model(name, access, TOKENIZER_FILES)


def _access(config: LoadingConfig) -> HubAccess:
    return HubAccess(
        revision=config.revision,
        download_dir=config.download_dir,
        token=config.hf_token,
        use_modelscope=config.use_modelscope,
    )
