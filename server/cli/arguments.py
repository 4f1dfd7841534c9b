"""Command-line arguments of EngineConfig and SamplingParams, made from their fields."""

import argparse
import dataclasses
import json
import types
import typing
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.sampling_params import SamplingParams

SAMPLING_FLAGS = {
    "max_tokens": "tokens to generate",
    "temperature": "0 takes the most likely token",
    "top_p": "keep the fewest tokens that reach this probability",
    "top_k": "keep this many tokens; 0 keeps all",
    "min_p": "drop tokens less likely than this share of the most likely one",
}


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each field of EngineConfig; `--model` has a positional twin."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    types_of = typing.get_type_hints(EngineConfig)
    for field in dataclasses.fields(EngineConfig):
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
    names = (field.name for field in dataclasses.fields(EngineConfig))
    return EngineConfig(**{name: getattr(arguments, name) for name in names})


def add_sampling_arguments(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add flags for the sampling parameters that a person sets by hand."""
    group = parser.add_argument_group("sampling")
    types_of = typing.get_type_hints(SamplingParams)
    for name, text in SAMPLING_FLAGS.items():
        default = defaults.get(name, getattr(SamplingParams(), name))
        options = _options(types_of[name])
        shown = text + _shown_default(default)
        group.add_argument(_flag(name), default=default, help=shown, **options)
    group.add_argument("--stop", action="append", default=[], help="text that ends the answer")


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """The SamplingParams of parsed arguments.

    Raises:
      InvalidRequestError: a value breaks its rule.
    """
    values = {name: getattr(arguments, name) for name in SAMPLING_FLAGS}
    return SamplingParams(**values, stop=list(arguments.stop))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _shown_default(default: Any) -> str:
    return (
        "" if default is None or default is False else f" (default: {default})".replace("%", "%%")
    )


def _options(annotation: Any) -> dict[str, Any]:
    """How argparse reads a field: its type without None."""
    if isinstance(annotation, types.UnionType):
        annotation = next(a for a in typing.get_args(annotation) if a is not types.NoneType)
    origin = typing.get_origin(annotation)
    if annotation is bool:
        return {"action": argparse.BooleanOptionalAction}
    if origin is tuple:
        return {"type": _sizes, "metavar": "N,N,..."}
    if origin is dict:
        return {"type": json.loads, "metavar": "JSON"}
    return {"type": annotation, "metavar": annotation.__name__.upper()}


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))
