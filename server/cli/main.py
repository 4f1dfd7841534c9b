"""The `jaxserve` command: finds the subcommand and turns known errors into one line."""

import difflib
import importlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from jaxserve import __version__
from jaxserve.environment import environment_settings
from jaxserve.errors import JaxServeError
from server.cli.arguments import add_config_arguments, option
from server.cli.failures import CommandError, tell
from server.cli.log_output import LOG_LEVELS, start_logging
from server.cli.parser import Parser

COMMANDS = {
    "serve": "serve a model over HTTP, with OpenAI's API",
    "generate": "continue prompts with a model in this process",
    "chat": "talk to a model, in this process or behind a server's URL",
    "complete": "continue texts one after the other, in this process or behind a server's URL",
    "run-batch": "answer a file of OpenAI batch lines with a model in this process",
    "plan": "show how an engine would use the memory, without loading weights",
    "bench": "time fixed workloads in this process",
}
NOT_YET_COMMANDS = ("collect-env", "launch", "snapshot", "preload", "download-kernels")
"""vLLM's commands that this release does not have."""


@dataclass(frozen=True, kw_only=True)
class SharedOptions:
    """Flags of every command."""

    config: str | None = option(
        None, "YAML file of flags and their values; the command line's own go over them", "general"
    )
    log_level: str = option(
        "info", f"least serious messages that are shown, of {', '.join(LOG_LEVELS)}", "general"
    )


def main(words: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Returns:
      0; 2 after an error in what the user gave: usage, model or settings; 1 when something else
      failed; 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if words is None else words)
    try:
        return _run(words)
    except CommandError as error:
        tell(str(error))
        return error.status
    except JaxServeError as error:
        tell(str(error))
        return 2
    except BrokenPipeError:
        # The interpreter flushes stdout once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def command_parser(name: str, module: ModuleType, environment: Mapping[str, str]) -> Parser:
    """The parser of one command.

    Args:
      name: of the command.
      module: with USAGE, COMMON and `add_arguments`.
      environment: variables; those that users of vLLM know become defaults.
    """
    text = COMMANDS[name]
    parser = Parser(
        prog=f"jaxserve {name}",
        usage=f"%(prog)s {module.USAGE}",
        description=f"{text[0].upper()}{text[1:]}.",
        common=module.COMMON,
    )
    module.add_arguments(parser)
    add_config_arguments(parser, SharedOptions)
    parser.set_defaults(**_defaults(parser, environment))
    return parser


def _run(words: list[str]) -> int:
    _use_every_standard_stream()
    name = words[0] if words else ""
    if name not in COMMANDS:
        return _run_without_command(words)
    module = importlib.import_module(f"server.cli.{name.replace('-', '_')}")
    arguments = command_parser(name, module, os.environ).parse_args(words[1:])
    if arguments.log_level not in LOG_LEVELS:
        raise CommandError(
            f"log_level must be one of {', '.join(LOG_LEVELS)}; got {arguments.log_level!r}", 2
        )
    with start_logging(arguments.log_level):
        return module.run(arguments)


def _defaults(parser: Parser, environment: Mapping[str, str]) -> dict[str, Any]:
    """Settings of the environment that a command has a flag for."""
    settings = environment_settings(environment)
    key = environment.get("JAXSERVE_API_KEY") or environment.get("VLLM_API_KEY")
    action = parser.find("api_key")
    if key and action is not None:
        settings["api_key"] = (key,) if isinstance(action.default, tuple) else key
    known = {name: value for name, value in settings.items() if parser.find(name) is not None}
    return known | {"environment_api_key": key}


def _run_without_command(words: list[str]) -> int:
    parser = Parser(
        prog="jaxserve",
        usage="%(prog)s COMMAND [OPTION ...]",
        description="LLM inference and serving in JAX for NVIDIA GPUs.",
        epilog="flags of a command: jaxserve COMMAND --help",
    )
    parser.add_argument("-v", "--version", action="version", version=f"jaxserve {__version__}")
    section = parser.add_argument_group("commands")
    for name, text in COMMANDS.items():
        section.add_argument(name, nargs="?", metavar=f"{name:<10}", help=text)
    if words and not words[0].startswith("-"):
        raise CommandError(_unknown_command(words[0]), 2)
    if not words:
        parser.print_help(sys.stderr)
        return 2
    parser.parse_args(words)
    raise CommandError("a COMMAND must come first; see jaxserve --help", 2)


def _unknown_command(name: str) -> str:
    if name in NOT_YET_COMMANDS:
        return f"{name} is not supported in this release"
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    advice = f"; did you mean {close[0]}?" if close else ""
    return f"COMMAND must be one of {', '.join(COMMANDS)}; got {name!r}{advice}"


def _use_every_standard_stream() -> None:
    """Make all three usable: a socket must not get a closed one's number, which others write to."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A character that the terminal lacks must not end the command.
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
