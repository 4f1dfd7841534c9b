"""LogWriter: log lines that never hold up or fail who writes them."""

import contextlib
import io
import logging
import os
import queue
import threading
from typing import TextIO

LINE_START = "%(levelname)s %(asctime)s"
"""How the lines of all our processes begin, in the style of `logging`."""
TIME_FORMAT = "%m-%d %H:%M:%S"
MAX_LINES = 10_000
"""Lines that wait for a reader of stderr; more are dropped and counted."""
EXIT_SECONDS = 1.0
"""How long the end of a process waits for its last lines to be taken."""


class LogWriter(logging.Handler):
    """Writes lines in a thread of its own: a full disk or a pipe that nobody reads stops nobody.

    Attributes:
      num_dropped: lines that were not written so far.
    """

    def __init__(self, stream: TextIO):
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_LINES)
        self.num_dropped = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._write_all, name="log writer", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line; what cannot be shown or queued is counted."""
        try:
            self._lines.put_nowait(self.format(record) + "\n")
        except Exception:  # a record's own __str__ may raise, too
            self.num_dropped += 1

    def close(self) -> None:
        """Wait a moment for the last lines to be written."""
        self._is_closing = True
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(EXIT_SECONDS)
        super().close()

    def _write_all(self) -> None:
        while not (self._is_closing and self._lines.empty()):
            line = self._lines.get()
            if line is not None:
                self._write(line)
            if self.num_dropped and self._lines.empty():
                self._tell_of_dropped()

    def _tell_of_dropped(self) -> None:
        num_dropped, self.num_dropped = self.num_dropped, 0
        if not self._write(f"WARNING jaxserve: {num_dropped} log lines were dropped\n"):
            self.num_dropped += num_dropped - 1

    def _write(self, line: str) -> bool:
        try:
            write_line(self._stream, line)
        except (OSError, ValueError):
            self.num_dropped += 1
            return False
        return True


def write_line(stream: TextIO, line: str) -> None:
    """Write past the stream's buffer, which would keep what fails and fail the exit with it.

    Raises:
      OSError: nobody takes it.
      ValueError: the stream is closed.
    """
    try:
        number = stream.fileno()
    except io.UnsupportedOperation:
        stream.write(line)
        return
    data = line.encode(stream.encoding or "utf-8", "backslashreplace")
    while data:
        data = data[os.write(number, data) :]
