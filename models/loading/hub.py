"""Fetches models from the Hugging Face Hub or ModelScope; a cached one needs no network."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from models.errors import ModelLoadError

CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
_IGNORED = ("*/*.safetensors*", "consolidated*.safetensors")
"""Copies of the same weights in another layout, which would double the download."""

_NAME = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9_])?"
_HUB_ID = re.compile(rf"(?:{_NAME}/)?{_NAME}", re.ASCII)
_SPLIT_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubAccess:
    """How repositories are fetched.

    Attributes:
      revision: branch, tag or commit; the main one if not given.
      download_dir: where files are kept, instead of the library's own cache.
      token: for private and gated repositories; never shown.
      use_modelscope: fetch from ModelScope instead of the Hugging Face Hub.
      argument: what the repository is asked for as; errors begin with it.
    """

    revision: str | None = None
    download_dir: str | None = None
    token: str | None = field(default=None, repr=False)
    use_modelscope: bool = False
    argument: str = "model"


DEFAULT_ACCESS = HubAccess()


def is_hub_id(text: str) -> bool:
    """Whether it can be the id of a repository: `owner/name`, or `name` alone."""
    is_formed = _HUB_ID.fullmatch(text) is not None and len(text) <= 96
    return is_formed and not any(part in text for part in ("--", "..")) and text[-4:] != ".git"


def split_gguf_id(text: str) -> tuple[str, str] | None:
    """The id and the file of `owner/name:file.gguf`; None for anything else."""
    repository, _, file = text.partition(":")
    is_file = file.endswith(".gguf") and not any(
        bad in file for bad in ("..", "\\", "\0", "*", "?", "[", ":")
    )
    if not is_file or file.startswith("/") or not is_hub_id(repository):
        return None
    return repository, file


def fetch_folder(repository: str, patterns: Sequence[str], access: HubAccess) -> Path:
    """Download those files of a repository that match a pattern and are not cached yet.

    Args:
      repository: its id.
      patterns: names of files, with `*`.
      access: from where, which revision, and as whom.

    Returns:
      The folder of the snapshot.

    Raises:
      ModelLoadError: no such repository or revision, no right to read it, no network and no
        copy in the cache, or the package modelscope is missing.
    """
    if access.use_modelscope:
        return _fetch_from_modelscope(repository, patterns, access)
    return _fetch_from_hub(repository, patterns, access)


def fetch_gguf(repository: str, file: str, access: HubAccess) -> Path:
    """Download one GGUF file, or all parts of a split one; raises as `fetch_folder` does.

    Returns:
      The file, or the part that was named.
    """
    folder = fetch_folder(repository, (_SPLIT_PART.sub(r"-*-of-\1.gguf", file),), access)
    path = folder / file
    if not path.is_file():
        raise ModelLoadError(f"{repository} must hold the file {file}; it does not")
    return path


def _fetch_from_hub(repository: str, patterns: Sequence[str], access: HubAccess) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        folder = huggingface_hub.snapshot_download(
            repository,
            revision=access.revision,
            cache_dir=access.download_dir,
            token=access.token,
            allow_patterns=list(patterns),
            ignore_patterns=list(_IGNORED),
        )
    except errors.GatedRepoError as error:
        advice = f"accept its terms at https://huggingface.co/{repository} and give hf_token"
        raise _refusal(access, repository, f"which is gated; {advice}") from error
    except errors.RepositoryNotFoundError as error:
        reason = "which is neither; check the name, or give hf_token if it is private"
        raise _refusal(access, repository, reason) from error
    except errors.DisabledRepoError as error:
        raise _refusal(access, repository, "which the Hub has disabled") from error
    except errors.RevisionNotFoundError as error:
        raise ModelLoadError(
            f"revision must be a branch, tag or commit of {repository}; got {access.revision!r}"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        reason = "which is not (wholly) in the cache while the Hub cannot be reached"
        advice = "check the network and HF_HUB_OFFLINE, or name a folder"
        raise _refusal(access, repository, f"{reason}; {advice}") from error
    except Exception as error:  # the HTTP library raises many kinds
        reason = f"whose download failed ({_first_line(error, access.token)}); try again"
        raise _refusal(access, repository, reason) from error
    return Path(folder)


def _fetch_from_modelscope(repository: str, patterns: Sequence[str], access: HubAccess) -> Path:
    try:
        from modelscope import snapshot_download  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ModelLoadError(
            "the package modelscope must be installed to fetch from ModelScope; it is not; "
            "run pip install 'jaxserve[modelscope]', or unset VLLM_USE_MODELSCOPE"
        ) from error
    try:
        folder = snapshot_download(
            repository,
            revision=access.revision,
            cache_dir=access.download_dir,
            allow_patterns=list(patterns),
            ignore_patterns=list(_IGNORED),
        )
    except Exception as error:  # the package raises many kinds
        reason = f"which ModelScope did not give ({_first_line(error, None)})"
        raise _refusal(access, repository, f"{reason}; check the name and the network") from error
    return Path(folder)


def _refusal(access: HubAccess, repository: str, reason: str) -> ModelLoadError:
    rule = f"{access.argument} must be a path that exists or the id of a repository"
    return ModelLoadError(f"{rule}; got {repository!r}, {reason}")


def _first_line(error: Exception, token: str | None) -> str:
    """Kind and first line of a library's error, without the token."""
    line = next(iter(str(error).splitlines()), "")[:200]
    return f"{type(error).__name__}: {line}".replace(token or "\0", "***")
