"""Command-line arguments of EngineConfig and SamplingParams, made from their fields."""

import argparse
import dataclasses
import json
import re
import sys
import types
import typing
from collections.abc import Collection
from typing import Any, NoReturn

from jaxserve.config import EngineConfig
from jaxserve.sampling_params import SamplingParams

SAMPLING_FLAGS = {
    "max_tokens": "tokens to generate",
    "temperature": "0 takes the most likely token",
    "top_p": "keep the fewest tokens that reach this probability",
    "top_k": "keep this many tokens; 0 keeps all",
    "min_p": "drop tokens less likely than this share of the most likely one",
}
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_FACTORS |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that takes underscores in flags for dashes, and tells errors in one line.

    Words behind a lone "--" are left as they are.
    """

    def parse_known_args(self, args=None, namespace=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        """See argparse."""
        words = sys.argv[1:] if args is None else list(args)
        end = words.index("--") if "--" in words else len(words)
        words[:end] = map(_dashed, words[:end])
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def add_engine_arguments(
    parser: argparse.ArgumentParser, without: Collection[str] = frozenset()
) -> None:
    """Add a flag for each field of EngineConfig, except some."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    types_of = typing.get_type_hints(EngineConfig)
    for field in dataclasses.fields(EngineConfig):
        if field.name in without:
            continue
        name = field.metadata["group"]
        group = groups.setdefault(name, parser.add_argument_group(name))
        options = _options(types_of[field.name])
        text = field.metadata["help"] + _shown_default(field.default)
        group.add_argument(_flag(field.name), default=field.default, help=text, **options)


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The EngineConfig of parsed arguments.

    Raises:
      EngineConfigError: a value breaks its rule.
    """
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    given = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    return EngineConfig(**given)


def interactive_engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The same for commands that answer one request at a time: few programs, a quick start."""
    config = engine_config(arguments)
    if config.max_num_seqs is not None:
        return config
    return dataclasses.replace(config, max_num_seqs=1)


def add_sampling_arguments(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add flags for the sampling parameters that a person sets by hand.

    Args:
      parser: what they are added to.
      defaults: replace the model's defaults.
    """
    group = parser.add_argument_group("sampling")
    types_of = typing.get_type_hints(SamplingParams)
    for name, text in SAMPLING_FLAGS.items():
        default = defaults.get(name)
        shown = " (default: the model's)" if default is None else _shown_default(default)
        options = _options(types_of[name])
        group.add_argument(_flag(name), default=default, help=text + shown, **options)
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="text that ends the answer; can be given several times",
    )


def sampling_params(
    arguments: argparse.Namespace, defaults: SamplingParams | None = None
) -> SamplingParams:
    """The SamplingParams of parsed arguments.

    Args:
      arguments: with the flags of `add_sampling_arguments`.
      defaults: the model's; without them the flags can be checked before a model is loaded.

    Raises:
      InvalidRequestError: a value breaks its rule.
    """
    params = SamplingParams() if defaults is None else defaults.clone()
    for name in SAMPLING_FLAGS:
        value = getattr(arguments, name)
        if value is not None:
            setattr(params, name, value)
    params.stop = list(arguments.stop)
    params.verify()
    return params


def _dashed(word: str) -> str:
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _shown_default(default: Any) -> str:
    if default is None or default is False:
        return ""
    return f" (default: {default})".replace("%", "%%")


def _options(annotation: Any) -> dict[str, Any]:
    """How argparse reads a field: its type without None."""
    if isinstance(annotation, types.UnionType):
        annotation = next(a for a in typing.get_args(annotation) if a is not types.NoneType)
    origin = typing.get_origin(annotation)
    if annotation is bool:
        return {"action": argparse.BooleanOptionalAction}
    if origin is tuple:
        return {"type": read_sizes, "metavar": "N,N,..."}
    if origin is dict:
        return {"type": read_json, "metavar": "JSON"}
    if annotation is int:
        return {"type": read_integer, "metavar": "N"}
    return {"type": annotation, "metavar": "X" if annotation is float else "TEXT"}


def read_integer(text: str) -> int:
    """An integer, or vLLM's short forms of one: 8k is 8000, 8K is 8192, 1.5M is 1572864."""
    match = re.fullmatch(r"(-?\d+)|(\d+(?:\.\d+)?)([kmgtKMGT])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be an integer, or one like 8k or 8K; got {text!r}")
    if match[1] is not None:
        return int(match[1])
    return int(float(match[2]) * _FACTORS[match[3]])


def read_sizes(text: str) -> tuple[int, ...]:
    """Positive integers with commas between them."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(
            f"must be positive integers with commas between them, as 8,64; got {text!r}"
        )
    return tuple(map(int, parts))


def read_json(text: str) -> Any:
    """A JSON value; EngineConfig checks its kind."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"must be JSON; got {text!r} ({error})") from error
