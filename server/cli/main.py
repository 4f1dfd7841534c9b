"""The `jaxserve` command: finds the subcommand and turns known errors into one line."""

import argparse
import io
import logging
import os
import sys
from collections.abc import Sequence

from jaxserve import __version__
from jaxserve.errors import JaxServeError
from server.cli import bench, chat, generate
from server.cli.arguments import Parser

SUBCOMMANDS = {"generate": generate, "chat": chat, "bench": bench}


def make_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = Parser(prog="jaxserve", description="LLM inference in JAX for NVIDIA GPUs.")
    parser.add_argument("-v", "--version", action="version", version=f"jaxserve {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, module in SUBCOMMANDS.items():
        text = module.HELP
        subparser = subparsers.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            usage=f"%(prog)s {module.USAGE}",
        )
        subparser.add_argument(
            "--log-level",
            default="info",
            choices=("debug", "info", "warning"),
            help="least serious messages that are shown (default: info)",
        )
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Returns:
      0; 2 after an error that the user can mend; 1 when nobody reads the output any more; 130
      after Ctrl-C.
    """
    parser = make_parser()
    arguments = parser.parse_args(words)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    _set_up_output(arguments.log_level)
    try:
        return arguments.run(arguments)
    except JaxServeError as error:
        print(f"jaxserve: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The interpreter flushes stdout once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def _set_up_output(log_level: str) -> None:
    """Log to stderr; a character that the terminal lacks must not end the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    for package in ("jaxserve", "models", "server"):
        logging.getLogger(package).setLevel(log_level.upper())


if __name__ == "__main__":
    sys.exit(main())
