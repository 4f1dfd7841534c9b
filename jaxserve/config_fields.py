"""Fields of settings: what their flags show, and the checks that all configs share; no JAX."""

import dataclasses
import json
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from jaxserve.errors import EngineConfigError, describe_value

KIND_NAMES: Mapping[type, str] = {
    str: "text",
    bool: "True or False",
    int: "an integer",
    float: "a number",
    dict: "a dict",
    tuple: "a list",
}
"""How an error names the kind that a field takes."""


def flag(default: Any, text: str, group: str, *, is_secret: bool = False) -> Any:
    """A field whose command-line flag shows `text`; a secret stays out of repr and of errors."""
    metadata = {"help": text, "group": group}
    return dataclasses.field(default=default, repr=not is_secret, metadata=metadata)


def check_types(config: Any, kind_names: Mapping[type, str] = KIND_NAMES) -> None:
    """Check the kind of each value against its field's annotation; a bool is no number.

    Args:
      config: a dataclass whose annotations are types, not texts.
      kind_names: for errors.

    Raises:
      EngineConfigError: a value is of another kind.
    """
    for field in dataclasses.fields(config):
        annotation: Any = field.type
        kinds = get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
        plain = tuple(get_origin(kind) or kind for kind in kinds)
        if float in plain:
            plain += (int,)
        value = getattr(config, field.name)
        is_other_bool = isinstance(value, bool) and bool not in plain
        if is_other_bool or not isinstance(value, plain):
            raise field_error(config, field.name, f"must be {kind_names[plain[0]]}")


def check_choice(config: Any, name: str, choices: Sequence[str | None]) -> None:
    """Check that a value is one of some."""
    if getattr(config, name) not in choices:
        raise field_error(config, name, f"must be one of {', '.join(filter(None, choices))}")


def check_range(config: Any, name: str, low: float, high: float = math.inf) -> None:
    """Check that a value is None or a finite number in [low, high]."""
    value = getattr(config, name)
    if value is None:
        return
    if not value >= low:  # NaN too
        raise field_error(config, name, f"must be at least {low}")
    if value > high or value == math.inf:
        rule = "must be finite" if high == math.inf else f"must be at most {high}"
        raise field_error(config, name, rule)


def check_json(config: Any, name: str) -> None:
    """Check that a value is None or what JSON can hold, so that another process can get it."""
    try:
        json.dumps(getattr(config, name))
    except (TypeError, ValueError, RecursionError) as error:
        raise field_error(config, name, "must hold only what JSON can") from error


def field_error(config: Any, name: str, rule: str) -> EngineConfigError:
    """The error of a field that breaks a rule; the value of a secret is not told."""
    value = getattr(config, name)
    is_secret = any(field.name == name and not field.repr for field in dataclasses.fields(config))
    shown = f"a {type(value).__name__}" if is_secret else describe_value(value)
    return EngineConfigError(f"{name} {rule}; got {shown}")
