"""The YAML file of `--config`: flags' names and values."""

import argparse
import difflib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from jaxserve.errors import EngineConfigError
from server.cli.shown_settings import SECRETS
from server.cli.values import value_from_yaml

MAX_FILE_BYTES = 1 << 20


def read_config_file(
    path: str, find: Callable[[str], argparse.Action | None], flags: Collection[str]
) -> dict[str, Any]:
    """Values by name of argument; null leaves a default as it is.

    Args:
      path: of a YAML file with one mapping, of flags' names to their values.
      find: the action of a flag's name; None if there is none.
      flags: all flags, for advice.

    Raises:
      EngineConfigError: the file cannot be read, or holds a key or value that no flag takes.
    """
    values: dict[str, Any] = {}
    for key, value in _load(path).items():
        action = find(key) if isinstance(key, str) else None
        if action is None or action.dest in ("help", "config", "version"):
            raise EngineConfigError(f"{path}: {key!r} is not a flag{_advice(key, flags)}")
        if value is None:
            continue
        try:
            values[action.dest] = _read_value(action, value)
        except argparse.ArgumentTypeError as error:
            rule = "must be of another kind" if action.dest in SECRETS else str(error)
            raise EngineConfigError(f"{path}: {key} {rule}") from error
    return values


def _read_value(action: argparse.Action, value: Any) -> Any:
    """A flag of a closed set, or one that is not supported, checks the value itself."""
    check = getattr(action, "check", None)
    if check is not None:
        check(value)
        return None
    read = value_from_yaml(action, value)
    if action.choices is not None and read not in action.choices:
        shown = ", ".join(map(str, action.choices))
        raise argparse.ArgumentTypeError(f"must be one of {shown}; got {value!r}")
    return read


def _load(path: str) -> dict[Any, Any]:
    import yaml

    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        if len(text) > MAX_FILE_BYTES:
            raise EngineConfigError(f"{path} must be at most {MAX_FILE_BYTES} bytes")
        loaded = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        rule = "must be a YAML file that can be read"
        raise EngineConfigError(f"--config {rule}; got {path!r}: {reason}") from error
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise EngineConfigError(f"{path} must be YAML; {reason}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise EngineConfigError(f"{path} must hold flags and their values, as `port: 8001`")
    return loaded


def _advice(key: Any, flags: Collection[str]) -> str:
    known = [flag.lstrip("-") for flag in flags]
    close = difflib.get_close_matches(str(key).replace("_", "-"), known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
