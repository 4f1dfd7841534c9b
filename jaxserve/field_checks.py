"""Checks of single values that a client sends; each returns the value as a plain Python type."""

import math
import numbers
from collections.abc import Sequence
from typing import Any

from jaxserve.errors import InvalidRequestError

MAX_INT64 = 2**63 - 1
MIN_INT64 = -(2**63)
MAX_TOKEN_ID = 2**31 - 1
MAX_NESTING = 64


def refuse_given(**arguments: Any) -> None:
    """Refuse by name what this release does not do; None and False ask for nothing."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise InvalidRequestError.for_field(name, "is not supported in this release", value)


def check_bool(name: str, value: Any) -> bool:
    """Take True or False, and nothing that only means it."""
    if not isinstance(value, bool):
        raise InvalidRequestError.for_field(name, "must be True or False", value)
    return value


def check_int(name: str, value: Any, low: int = MIN_INT64, high: int = MAX_INT64) -> int:
    """Take an integer in [low, high]; a bool or a float is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidRequestError.for_field(name, "must be an integer", value)
    number = int(value)
    if number < low:
        raise InvalidRequestError.for_field(name, f"must be at least {low}", number)
    if number > high:
        raise InvalidRequestError.for_field(name, f"must be at most {high}", number)
    return number


def check_number(
    name: str,
    value: Any,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    is_low_open: bool = False,
) -> float:
    """Take a finite number in [low, high], or in (low, high] when `is_low_open`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidRequestError.for_field(name, "must be a number", value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidRequestError.for_field(name, "must be a finite number", value)
    if number < low or number > high or (is_low_open and number == low):
        rule = f"must be in {'(' if is_low_open else '['}{low:g}, {high:g}]"
        if high == math.inf:
            rule = f"must be {'greater than' if is_low_open else 'at least'} {low:g}"
        raise InvalidRequestError.for_field(name, rule, value)
    return number


def check_strings(name: str, value: Any) -> list[str]:
    """Take a list or tuple of non-empty strings; the list returned is a new one."""
    if not isinstance(value, list | tuple):
        raise InvalidRequestError.for_field(name, "must be a list of strings", value)
    for item in value:
        if not isinstance(item, str):
            raise InvalidRequestError.for_field(name, "must hold only strings", item)
        if not item:
            raise InvalidRequestError.for_field(name, "must hold no empty string", value)
    return list(value)


def check_token_ids(name: str, value: Any) -> list[int]:
    """Take a list or tuple of token ids; the list returned is a new one."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InvalidRequestError.for_field(name, "must be a list of token ids", value)
    return [check_int(name, item, 0, MAX_TOKEN_ID) for item in value]


def check_instance[T](name: str, value: Any, kind: type[T]) -> T:
    """Take an instance of `kind`."""
    if not isinstance(value, kind):
        raise InvalidRequestError.for_field(name, f"must be a {kind.__name__}", value)
    return value


def check_nesting(name: str, value: Any) -> None:
    """Refuse containers nested deeper than `MAX_NESTING`, and integers of more than 64 bits."""
    waiting = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        if isinstance(item, dict | list | tuple):
            if depth >= MAX_NESTING:
                rule = f"must be nested at most {MAX_NESTING} deep"
                raise InvalidRequestError(f"{name} {rule}", parameter=name, value=value)
            children = item.values() if isinstance(item, dict) else item
            waiting.extend((child, depth + 1) for child in children)
        elif isinstance(item, int) and not MIN_INT64 <= item <= MAX_INT64:
            raise InvalidRequestError.for_field(name, "must hold integers of 64 bits", item)
