"""TypedConfig: typed, bounded access to a config dictionary; every refusal names file and key."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.errors import ModelLoadError

MAX_SHOWN = 80
"""Characters of a refused value that an error shows."""


@dataclass(frozen=True, slots=True)
class TypedConfig:
    """A JSON object and where it stands.

    An absent key and null are the same: the default, or a refusal where there is none.

    Attributes:
      values: the object.
      source: names the file, and the object within it, in errors.
    """

    values: Mapping[str, Any]
    source: str

    def error(self, key: str, rule: str, value: object) -> ModelLoadError:
        """The error "file: key rule; got value"."""
        return ModelLoadError(f"{self.source}: {key} {rule}; got {_shown(value)}")

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in [low, high]; booleans and 1.0 are none."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"must be an integer in [{low}, {high}]", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._get(key, default)
        number = _as_float(value)
        if number is None or number <= 0:
            raise self.error(key, "must be a finite number above 0", value)
        return number

    def optional_number(self, key: str) -> float | None:
        """A finite number above 0, or None where the key is absent or null."""
        return None if self.values.get(key) is None else self.number(key)

    def boolean(self, key: str, default: bool = False) -> bool:
        """True or false; 0, 1 and strings are neither."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false", value)
        return value

    def choice(self, key: str, choices: tuple[str, ...], default: str | None = None) -> str:
        """One of the given strings."""
        value = self._get(key, default)
        if value not in choices:
            raise self.error(key, f"must be one of {', '.join(choices)}", value)
        return value

    def choices(self, key: str, length: int, choices: tuple[str, ...]) -> tuple[str, ...]:
        """A list of exactly `length` of the given strings."""
        value = self.values.get(key)
        if not isinstance(value, list | tuple) or len(value) != length:
            raise self.error(key, f"must be a list of {length} names", value)
        for name in value:
            if name not in choices:
                raise self.error(key, f"must hold only {', '.join(choices)}", name)
        return tuple(value)

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of exactly `length` finite numbers above 0."""
        value = self.values.get(key)
        numbers = [_as_float(v) for v in value] if isinstance(value, list | tuple) else []
        if len(numbers) != length or not all(n is not None and n > 0 for n in numbers):
            raise self.error(key, f"must be a list of {length} finite numbers above 0", value)
        return tuple(n for n in numbers if n is not None)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id, a list of them, or null."""
        value = self.values.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(v) is int and 0 <= v < 1 << 31 for v in values):
            raise self.error(key, "must be a token id or a list of them", value)
        return tuple(values)

    def part(self, key: str) -> "TypedConfig":
        """The object under a key; an empty one where there is none."""
        value = self.values.get(key)
        if not isinstance(value, Mapping | None):
            raise self.error(key, "must be an object", value)
        return TypedConfig(value or {}, f"{self.source}: {key}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value


def _as_float(value: object) -> float | None:
    """A finite number as a float; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _shown(value: object) -> str:
    """The value's repr, cut; of integers of thousands of digits Python makes none."""
    try:
        text = repr(value)
    except ValueError:
        return f"a value of type {type(value).__name__} with a number too long to show"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
