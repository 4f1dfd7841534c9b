"""Where a command's log goes: to stderr, past whoever does not read it."""

import contextlib
import logging
import sys
from collections.abc import Iterator

from jaxserve.log_writer import LINE_START, TIME_FORMAT, LogWriter

LOG_LEVELS = ("debug", "info", "warning", "error")


@contextlib.contextmanager
def start_logging(level: str) -> Iterator[LogWriter]:
    """Log to stderr until the block ends; jaxserve's own messages from `level` up."""
    root = logging.getLogger()
    writer = LogWriter(sys.stderr)
    writer.setFormatter(logging.Formatter(f"{LINE_START} %(name)s: %(message)s", TIME_FORMAT))
    own = [logging.getLogger(package) for package in ("jaxserve", "models", "server")]
    before = [(logger, logger.level) for logger in (root, *own)]
    root.addHandler(writer)
    root.setLevel(logging.WARNING)
    for logger in own:
        logger.setLevel(level.upper())
    try:
        yield writer
    finally:
        for logger, old_level in before:
            logger.setLevel(old_level)
        root.removeHandler(writer)
        writer.close()
