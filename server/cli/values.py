"""How words of the command line and values of a YAML file become values of a dataclass's field."""

import argparse
import json
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.errors import describe_value
from jaxserve.quantities import read_quantity


class DottedJson(str):
    """JSON made of a flag with dots: it is merged into the flag's value and replaces nothing else.

    `--hf-overrides.rope_scaling.factor 2` becomes `{"rope_scaling": {"factor": 2}}`.
    """


class JsonAction(argparse.Action):
    """Takes a JSON value; parts given with dots go over what the flag or its default holds."""

    def __call__(self, parser, namespace, values: Any, option_string=None) -> None:
        """See argparse."""
        value = _read(self, read_json, values)
        if isinstance(values, DottedJson):
            value = merge(getattr(namespace, self.dest), value)
        setattr(namespace, self.dest, value)


class ListAction(argparse.Action):
    """Takes one word or more, or one JSON list; a flag that comes again adds to the list."""

    def __call__(self, parser, namespace, values: Any, option_string=None) -> None:
        """See argparse."""
        words = _read(self, read_words, values)
        before = getattr(namespace, self.dest)
        if before is not None and before is not self.default:
            words = (*before, *words)
        setattr(namespace, self.dest, words)


def _read[T](action: argparse.Action, read: Callable[[Any], T], values: Any) -> T:
    """Read inside an action as argparse does outside of it."""
    try:
        return read(values)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentError(action, str(error)) from error


def option_of(annotation: Any) -> dict[str, Any]:
    """How argparse reads a field: by its type without None; of int | str the text is "auto"."""
    if isinstance(annotation, types.UnionType):
        kinds = [a for a in typing.get_args(annotation) if a is not types.NoneType]
        if kinds == [int, str]:
            return {"type": read_integer_or_auto, "metavar": "N|auto"}
        annotation = kinds[0]
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is bool:
        return {"action": argparse.BooleanOptionalAction}
    if origin is tuple and inner[0] is int:
        return {"type": read_sizes, "metavar": "N,N,..."}
    if origin is tuple:
        return {"action": ListAction, "nargs": "+", "metavar": "TEXT"}
    if origin is dict:
        return {"action": JsonAction, "metavar": "JSON"}
    if annotation is int:
        return {"type": read_integer, "metavar": "N"}
    return {"type": annotation, "metavar": "X" if annotation is float else "TEXT"}


def read_integer(text: str) -> int:
    """An integer, or a short form of one; see `read_quantity`."""
    try:
        return read_quantity(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; got {describe_value(text)}") from error


def read_integer_or_auto(text: str) -> int | str:
    """An integer as `read_integer` takes it, or "auto"."""
    if text == "auto":
        return text
    try:
        return read_quantity(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, or auto; got {describe_value(text)}") from error


def read_sizes(text: str) -> tuple[int, ...]:
    """Positive integers with commas between them, short forms too."""
    try:
        sizes = tuple(read_quantity(part.strip()) for part in text.split(","))
    except ValueError:
        sizes = (0,)
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(
            f"must be positive integers with commas between them, as 8,64; got {text!r}"
        )
    return sizes


def read_json(text: str) -> Any:
    """A JSON value; the config checks its kind."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"must be JSON; got {text!r} ({error})") from error


def read_words(words: Sequence[str]) -> tuple[str, ...]:
    """Words as they stand, or the texts of one word that is a JSON list."""
    if len(words) == 1 and words[0].startswith("["):
        value = read_json(words[0])
        if not all(isinstance(item, str) for item in value):
            raise argparse.ArgumentTypeError(f"must be a list of texts; got {words[0]!r}")
        return tuple(value)
    return tuple(words)


def merge(below: Any, above: Any) -> Any:
    """`above` over `below`; dicts are merged key by key."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    merged = {key: merge(below.get(key), value) for key, value in above.items()}
    return below | merged


def value_from_yaml(action: argparse.Action, value: Any) -> Any:
    """The value of a flag whose value stands in a YAML file.

    Raises:
      ArgumentTypeError: it has another kind than the flag's.
    """
    if isinstance(action, JsonAction):
        return read_json(value) if isinstance(value, str) else value
    if action.nargs == 0:
        return _yaml_bool(value)
    if isinstance(action, ListAction) or (action.type is read_sizes and isinstance(value, list)):
        return _yaml_list(action, value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise argparse.ArgumentTypeError(f"must be one text or number; got {value!r}")
    read = action.type if callable(action.type) else str
    try:
        return read(str(value))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a number; got {value!r}") from error


def _yaml_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise argparse.ArgumentTypeError(f"must be true or false; got {value!r}")
    return value


def _yaml_list(action: argparse.Action, value: Any) -> tuple[Any, ...]:
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, str | int | float) for item in items):
        raise argparse.ArgumentTypeError(f"must be a list of texts or numbers; got {value!r}")
    words = [str(item) for item in items]
    return read_words(words) if isinstance(action, ListAction) else read_sizes(",".join(words))
