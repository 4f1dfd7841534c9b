"""Reads the tokenizer files of a Hugging Face folder; runs no code that came with them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from models.errors import ModelLoadError
from models.loading.model_paths import check_inside
from models.loading.strict_json import read_file, read_json_object

MAX_TOKENIZER_BYTES = 256 << 20
MAX_TEMPLATE_BYTES = 4 << 20
_SPECIAL_NAMES = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFolder:
    """What a folder says about its tokenizer; the names are those of Tokenizer."""

    backend: Backend
    special_tokens: Mapping[str, str]
    eos_token_ids: tuple[int, ...]
    chat_templates: Mapping[str, str]
    add_bos: bool | None
    add_eos: bool


def read_folder(folder: Path, file: str = "tokenizer.json") -> TokenizerFolder:
    """Read tokenizer.json, tokenizer_config.json, generation_config.json and chat templates.

    Folders from before `added_tokens_decoder` name special tokens in special_tokens_map.json.

    Args:
      folder: with these files.
      file: the name of tokenizer.json in it.

    Raises:
      ModelLoadError: a file is missing, malformed, too long, or a link that leaves the folder.
    """
    backend = _read_backend(folder / file)
    config = _optional_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(config, folder, "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # as in transformers
        old_file = "special_tokens_map.json"
        special_tokens |= _special_tokens(_optional_json(folder / old_file), folder, old_file)
    return TokenizerFolder(
        backend=backend,
        special_tokens=special_tokens,
        eos_token_ids=_eos_token_ids(folder, backend, special_tokens),
        chat_templates=_chat_templates(folder, config),
        add_bos=_flag(config, "add_bos_token", folder),
        add_eos=_flag(config, "add_eos_token", folder) or False,
    )


def _read_backend(path: Path) -> Backend:
    if not path.exists() and path.name == "tokenizer.json":
        return _convert(path.parent)
    check_inside(path, path.parent)
    text = read_file(path, MAX_TOKENIZER_BYTES)
    try:
        backend = Backend.from_buffer(text)
        backend.encode("a")  # panics where a special token of the template is missing
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # nothing more specific, and a panic is no Exception
        raise ModelLoadError(f"{path}: content: must be a tokenizer; {error}") from error
    backend.no_padding()
    backend.no_truncation()
    return backend


def _convert(folder: Path) -> Backend:
    """Build the tokenizer of older files (vocab.json, merges.txt, ...) with transformers."""
    if not any((folder / name).is_file() for name in ("vocab.json", "tokenizer.model")):
        raise ModelLoadError(f"{folder}: tokenizer.json: the file is missing")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        return tokenizer.backend_tokenizer
    except Exception as error:  # transformers raises many kinds
        advice = "save it with save_pretrained of a fast tokenizer"
        raise ModelLoadError(f"{folder}: tokenizer.json: missing; {advice}; {error}") from error


def _optional_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    check_inside(path, path.parent)
    return read_json_object(path)


def _flag(config: Mapping[str, Any], key: str, folder: Path) -> bool | None:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise _error(folder, "tokenizer_config.json", key, "must be true or false", value)
    return value


def _special_tokens(config: Mapping[str, Any], folder: Path, file: str) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
        elif value is not None:
            raise _error(folder, file, name, "must be a token", value)
    return tokens


def _eos_token_ids(
    folder: Path, backend: Backend, special_tokens: Mapping[str, str]
) -> tuple[int, ...]:
    """Those of generation_config.json, else of config.json, and the tokenizer's own."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _optional_json(folder / name).get("eos_token_id")
        found = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token_id) is int and token_id >= 0 for token_id in found):
            raise _error(folder, name, "eos_token_id", "must be ids", value)
        ids += found
        if found:
            break
    own = backend.token_to_id(special_tokens.get("eos_token", ""))
    return tuple(dict.fromkeys([*ids, *([] if own is None else [own])]))


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Files win over tokenizer_config.json, as in transformers."""
    value = config.get("chat_template") or []
    if isinstance(value, str):
        value = [{"name": "default", "template": value}]
    if not isinstance(value, list):
        raise _error(folder, "tokenizer_config.json", "chat_template", "must be text", value)
    templates: dict[str, str] = {}
    for entry in value:
        if not (isinstance(entry, dict) and isinstance(entry.get("template"), str)):
            raise _error(folder, "tokenizer_config.json", "chat_template", "must be text", entry)
        templates[str(entry.get("name"))] = entry["template"]
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in folder.glob("additional_chat_templates/*.jinja")}
    for name, path in files.items():
        if path.is_file():
            templates[name] = _read_template(path, folder)
    return templates


def _read_template(path: Path, folder: Path) -> str:
    check_inside(path, folder)
    try:
        return read_file(path, MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{path}: content: must be UTF-8; {error}") from error


def _error(folder: Path, file: str, key: str, rule: str, value: object) -> ModelLoadError:
    return ModelLoadError(f"{folder / file}: {key}: {rule}; got {value!r:.200}")
