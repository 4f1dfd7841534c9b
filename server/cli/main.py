"""The `jaxserve` command: finds the subcommand and turns known errors into one line."""

import argparse
import logging
import sys
from collections.abc import Sequence

from jaxserve import __version__
from jaxserve.errors import JaxServeError
from server.cli import bench, chat, generate

SUBCOMMANDS = {"generate": generate, "chat": chat, "bench": bench}


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser that takes underscores in flags for dashes, as vLLM's does."""

    def parse_known_args(self, args=None, namespace=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args([_dashed(word) for word in words], namespace)


def _dashed(word: str) -> str:
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


def make_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = _Parser(prog="jaxserve", description="LLM inference in JAX for NVIDIA GPUs.")
    parser.add_argument("-v", "--version", action="version", version=f"jaxserve {__version__}")
    parser.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning"), help="of this package"
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in SUBCOMMANDS.items():
        subparser = subparsers.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Returns:
      0, or 2 after an error that the user can mend, or 130 after Ctrl-C.
    """
    arguments = make_parser().parse_args(words)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    for package in ("jaxserve", "models", "server"):
        logging.getLogger(package).setLevel(arguments.log_level.upper())
    try:
        return arguments.run(arguments)
    except JaxServeError as error:
        print(f"jaxserve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
