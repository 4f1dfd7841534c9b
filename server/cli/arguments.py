"""Command-line arguments of dataclasses and of SamplingParams, made from their fields."""

import argparse
import dataclasses
import typing
from collections.abc import Collection
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.errors import EngineConfigError
from jaxserve.sampling_params import SamplingParams
from server.cli.values import option_of

SAMPLING_FLAGS = {
    "max_tokens": "tokens to generate",
    "temperature": "0 takes the most likely token",
    "top_p": "keep the fewest tokens that reach this probability",
    "top_k": "keep this many tokens; 0 keeps all",
    "min_p": "drop tokens less likely than this share of the most likely one",
}
_SHORT = {"tensor_parallel_size": "-tp"}
"""vLLM's short forms of fields of the configs; a field's metadata may name another one."""


def option(default: Any, text: str, group: str, *, short: str | None = None, **reading: Any) -> Any:
    """A field of a command's own dataclass.

    Args:
      default: of the field.
      text: what the help says.
      group: of the help.
      short: a second name of the flag, as "-q".
      reading: what argparse needs beyond the field's type, as `metavar`.
    """
    metadata = {"help": text, "group": group, "short": short, "reading": reading}
    return dataclasses.field(default=default, metadata=metadata)


def add_config_arguments(
    parser: argparse.ArgumentParser, config: type, without: Collection[str] = frozenset()
) -> None:
    """Add a flag for each field of a dataclass, except some.

    Args:
      parser: what they are added to; groups of one name are one group.
      config: its fields have the metadata "help" and "group".
      without: names of fields.
    """
    groups = {group.title: group for group in parser._action_groups}
    types_of = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if field.name in without:
            continue
        title = field.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        text = field.metadata["help"] + _shown_default(field.default if field.repr else None)
        short = field.metadata.get("short") or _SHORT.get(field.name)
        names = [*([short] if short else []), _flag(field.name)]
        options = option_of(types_of[field.name]) | field.metadata.get("reading", {})
        groups[title].add_argument(*names, default=field.default, help=text, **options)


def read_config[T](arguments: argparse.Namespace, config: type[T]) -> T:
    """The dataclass of parsed arguments; fields without a flag keep their defaults.

    Raises:
      EngineConfigError: a value breaks its rule.
    """
    names = [field.name for field in dataclasses.fields(config)]  # pyright: ignore[reportArgumentType]
    return config(**{name: getattr(arguments, name) for name in names if hasattr(arguments, name)})


def refuse_given(
    arguments: argparse.Namespace, config: type, rule: str, without: Collection[str] = frozenset()
) -> None:
    """Refuse flags of a dataclass that are not at their defaults, since nothing would read them.

    Raises:
      EngineConfigError: "`flag` `rule`".
    """
    for field in dataclasses.fields(config):
        is_given = getattr(arguments, field.name, field.default) != field.default
        if is_given and field.name not in without:
            raise EngineConfigError(f"{_flag(field.name)} {rule}")


def add_engine_arguments(
    parser: argparse.ArgumentParser, without: Collection[str] = frozenset()
) -> None:
    """Add a flag for each field of EngineConfig, except some."""
    add_config_arguments(parser, EngineConfig, without)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, which stands for --model."""
    parser.add_argument(
        "model_tag", nargs="?", metavar="MODEL", help="the model, as --model names it"
    )


def one_model(arguments: argparse.Namespace) -> str | None:
    """The model of MODEL or --model.

    Raises:
      EngineConfigError: both are given and differ.
    """
    tag, model = arguments.model_tag, arguments.model
    if tag is not None and model is not None and tag != model:
        raise EngineConfigError(f"MODEL must be given once; got {tag!r} and --model {model!r}")
    return tag if tag is not None else model


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The EngineConfig of parsed arguments.

    Raises:
      EngineConfigError: a value breaks its rule.
    """
    return read_config(arguments, EngineConfig)


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
        options = option_of(types_of[name])
        group.add_argument(_flag(name), default=default, help=text + shown, **options)
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="text that ends the answer; can be given several times",
    )


def given_sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that the command line sets."""
    given = {name: getattr(arguments, name) for name in SAMPLING_FLAGS}
    given = {name: value for name, value in given.items() if value is not None}
    return given | ({"stop": list(arguments.stop)} if arguments.stop else {})


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
    for name, value in given_sampling(arguments).items():
        setattr(params, name, value)
    params.verify()
    return params


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _shown_default(default: Any) -> str:
    if default is None or default is False or default == "" or default == ():
        return ""
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
    return f" (default: {shown})".replace("%", "%%")
