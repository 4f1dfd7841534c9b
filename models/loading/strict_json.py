"""Reads JSON that came with a model, and refuses what a healthy file never holds."""

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from models.errors import ModelLoadError

MAX_JSON_BYTES = 64 << 20
MAX_JSON_DEPTH = 64


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      ModelLoadError: the file is missing, not a regular file, longer than `max_bytes`, or
        `parse_json_object` refuses its content.
    """
    return parse_json_object(read_file(path, max_bytes), str(path))


def read_file(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """The bytes of a regular file of at most `max_bytes`; ModelLoadError for any other."""
    try:
        if not path.is_file():
            raise ModelLoadError(f"{path} must be a file; it is missing or something else")
        size = path.stat().st_size
        if size > max_bytes:
            raise ModelLoadError(f"{path} must have at most {max_bytes} bytes; got {size}")
        return path.read_bytes()
    except OSError as error:
        raise ModelLoadError(f"{path} must be readable; {error.strerror}") from error


def parse_json_object(text: bytes, source: str) -> dict[str, Any]:
    """Parse UTF-8 JSON into a dict.

    Args:
      text: the bytes of one JSON object.
      source: names the text in errors.

    Raises:
      ModelLoadError: not UTF-8, not JSON, not an object, a key twice in one object, NaN or
        infinity, or more than 64 levels deep.
    """
    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
        )
    except RecursionError:
        raise ModelLoadError(f"{source} must nest at most {MAX_JSON_DEPTH} levels") from None
    except ValueError as error:
        raise ModelLoadError(f"{source} must be strict UTF-8 JSON; {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{source} must be a JSON object; got {type(value).__name__}")
    _check_depth(value, source)
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {twice!r} stands twice in one object")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits} does not fit a float")
    return value


def _check_depth(value: object, source: str) -> None:
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return
    raise ModelLoadError(f"{source} must nest at most {MAX_JSON_DEPTH} levels")


def _children(value: object) -> list[object]:
    """The containers inside a container."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return []
    return [child for child in value if isinstance(child, dict | list)]
