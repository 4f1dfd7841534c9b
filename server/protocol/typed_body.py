"""decode_request: from a body to a typed request, with its unknown fields listed or refused."""

import re
from typing import Any

import msgspec

from jaxserve.errors import InvalidRequestError
from server.protocol.json_body import decode_object

_PATH = re.compile(r"^(?P<rule>.*?)(?: - at `(?P<key>key in )?\$(?P<path>.*)`)?$", re.DOTALL)
_EXPECTED = re.compile(r"^Expected (?P<rule>.*?)(?:, got (?P<got>.*))?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>\w+)`$")
_KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_MAX_SHOWN = 16


def decode_request[T: msgspec.Struct](
    kind: type[T], body: bytes | dict[str, Any], *, max_depth: int = 64, strict: bool = False
) -> tuple[T, list[str]]:
    """Make a typed request of a body.

    Args:
      kind: the struct.
      body: bytes of JSON, or an object that was decoded already.
      max_depth: how deep lists and objects may be nested.
      strict: refuse fields that the struct does not have.

    Returns:
      The request, and the names of the body's fields that it does not have.

    Raises:
      InvalidRequestError: the body is malformed, or a field has a wrong type or value.
      RequestTooLargeError: it holds too many values.
    """
    fields = decode_object(body, max_depth) if isinstance(body, bytes) else body
    unknown = sorted(fields.keys() - set(kind.__struct_fields__))
    if unknown and strict:
        raise InvalidRequestError.for_field(
            unknown[0], "must be a field of this request", fields[unknown[0]]
        )
    try:
        return msgspec.convert(fields, kind), unknown
    except msgspec.ValidationError as error:
        raise _readable(str(error), fields) from error


def ignored_fields_header(names: list[str]) -> str:
    """Names of unknown fields as the value of a header: printable ASCII, bounded."""
    shown = [re.sub(r"[^\w.-]", "?", name, flags=re.ASCII)[:64] for name in names[:_MAX_SHOWN]]
    return ",".join(shown + ["..."] * (len(names) > _MAX_SHOWN))


def _readable(text: str, fields: dict[str, Any]) -> InvalidRequestError:
    """An error of msgspec in the form that all our messages have."""
    match = _PATH.match(text)
    assert match is not None
    rule, path = match["rule"], (match["path"] or "").removeprefix(".").replace("[...]", "")
    missing = _MISSING.match(rule)
    if missing:
        path = ".".join(filter(None, [path, missing["name"]]))
        return InvalidRequestError(f"{path} must be given", parameter=path)
    expected = _EXPECTED.match(rule)
    if expected:
        rule = f"must be {_plain(expected['rule'])}"
    else:
        rule = f"must be right: {rule}"
    if path in fields:
        return InvalidRequestError.for_field(path, rule, fields[path])
    got = f"; got {_plain(expected['got'])}" if expected and expected["got"] else ""
    return InvalidRequestError(f"{path or 'body'} {rule}{got}", parameter=path or None)


def _plain(kinds: str) -> str:
    """Names of types as msgspec gives them, such as `int | null`, for people."""
    match = re.match(r"((?:\w+ \| )*\w+)(.*)$", kinds.replace("`", ""), re.DOTALL)
    if match is None:
        return kinds
    names = [name for name in match[1].split(" | ") if name != "null"] or ["null"]
    return " or ".join(_KINDS.get(name, name) for name in names) + match[2]
