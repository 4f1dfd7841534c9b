"""How a command fails: one line on stderr, and a status."""

import contextlib
import sys

from jaxserve.log_writer import write_line


class CommandError(Exception):
    """What ends a command.

    Attributes:
      status: 1 for what went wrong while it ran; 2 for what the user gave.
    """

    def __init__(self, message: str, status: int = 1):
        super().__init__(message)
        self.status = status


def tell(message: str) -> None:
    """Write a line for people to stderr, if anybody can still read it."""
    with contextlib.suppress(OSError, ValueError):
        write_line(sys.stderr, f"jaxserve: {message}\n")
