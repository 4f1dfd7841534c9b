"""decode_object: from the bytes of a body to one JSON object, with bounds on what it may cost."""

import json
import re
from typing import Any

import msgspec

from jaxserve.errors import InvalidRequestError, RequestTooLargeError, describe_value

MAX_CONTAINERS = 100_000
"""Lists and objects of a body: each costs 64 bytes and more where its text has two."""
MAX_STRINGS = 250_000
MAX_VALUES = 2_000_000
"""Values of a body; a prompt of token ids has one an id."""

_PAIR = re.compile(rb"\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}", re.IGNORECASE)
_HALF = re.compile(rb"\\ud[89a-f]", re.IGNORECASE)
_OPENING, _CLOSING = b"[{", b"]}"
_NOT_BRACKETS = bytes(set(range(256)) - set(_OPENING + _CLOSING))
_decoder = msgspec.json.Decoder()


def decode_object(body: bytes, max_depth: int = 64) -> dict[str, Any]:
    """The JSON object that a body is.

    Args:
      body: as it came.
      max_depth: how deep lists and objects may be nested.

    Raises:
      InvalidRequestError: it is no JSON (RFC 8259: UTF-8, no NaN), not an object, is nested too
        deep, holds a key twice, half a surrogate pair, or a number of too many digits.
      RequestTooLargeError: it has too many values.
    """
    if not body.strip():
        raise InvalidRequestError("body must be a JSON object; got nothing")
    bare = _outside_strings(body)
    _check_shape(bare, max_depth)
    try:
        value = _decoder.decode(body)
    except UnicodeDecodeError as error:
        raise InvalidRequestError("body must be UTF-8") from error
    except msgspec.MsgspecError as error:
        if _HALF.search(_PAIR.sub(b"", body.replace(b"\\\\", b""))):
            # msgspec takes most of them for an end of the body.
            raise InvalidRequestError("body must hold no half of a surrogate pair") from error
        raise InvalidRequestError(f"body must be JSON; got: {error}") from error
    except RecursionError as error:
        raise InvalidRequestError("body must not be nested so deep") from error
    except ValueError as error:  # Python reads no integer of more than 4 300 digits
        raise InvalidRequestError("body must hold no number of so many digits") from error
    if not isinstance(value, dict):
        raise InvalidRequestError(f"body must be a JSON object; got {describe_value(value)}")
    # Each member of an object has one colon; a key that came twice is one key in the result.
    if _count_keys(value) != bare.count(b":"):
        json.loads(body, object_pairs_hook=_refuse_repeated)
    return value


def _outside_strings(body: bytes) -> bytes:
    """The body without its strings, which may hold any bracket."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    if plain.count(b'"') > 2 * MAX_STRINGS:
        raise RequestTooLargeError(f"body must hold at most {MAX_STRINGS} texts")
    return b"".join(plain.split(b'"')[::2])


def _check_shape(bare: bytes, max_depth: int) -> None:
    """Refuse what would take far more memory than its bytes, before anything is made of it."""
    brackets = bare.translate(None, _NOT_BRACKETS)
    if len(brackets) > 2 * MAX_CONTAINERS or bare.count(b",") > MAX_VALUES:
        raise RequestTooLargeError(
            f"body must hold at most {MAX_CONTAINERS} lists and objects and {MAX_VALUES} values"
        )
    depth = 0
    for bracket in brackets:
        if bracket in _OPENING:
            depth += 1
            if depth > max_depth:
                raise InvalidRequestError(f"body must be nested at most {max_depth} deep")
        else:
            depth -= 1


def _count_keys(value: dict[str, Any]) -> int:
    num_keys = 0
    stack: list[Any] = [value]
    while stack:
        item = stack.pop()
        if type(item) is dict:
            num_keys += len(item)
            item = item.values()
        stack.extend(child for child in item if type(child) in (dict, list))
    return num_keys


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    seen: set[str] = set()
    key = next(key for key, _ in pairs if key in seen or seen.add(key))
    is_name = key.isidentifier() and len(key) <= 64
    raise InvalidRequestError(
        f"body must hold each key once; got {describe_value(key)} twice",
        parameter=key if is_name else None,
    )
