"""StopStrings: finds the first stop string in a stream of text and lets no part of it out."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopResult:
    """What one piece of text led to.

    Attributes:
      emit: text that may go out.
      matched: the stop string that ended the text, None while there is none.
    """

    emit: str
    matched: str | None = None


class StopStrings:
    """Holds text back only while its end could still become a stop string.

    The stop string that is complete first wins; of several that end at the same character the
    longest. So the result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stop: Sequence[str], include_in_output: bool = False):
        """Start at the beginning of a text.

        Args:
          stop: the stop strings, none of them empty; none at all lets everything through.
          include_in_output: give the stop string out too; then nothing needs to be held back.

        Raises:
          ValueError: a stop string is empty.
        """
        if "" in stop:
            raise ValueError("stop must not hold an empty string; got ''")
        self._stop = tuple(stop)
        self._includes = include_in_output
        self._longest = max(map(len, stop), default=0)
        self._pending = ""
        """The end of the text so far that could be the beginning of a stop string."""
        self._matched: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to look for."""
        return not self._stop

    @property
    def matched(self) -> str | None:
        """The stop string that was found, None while there is none."""
        return self._matched

    def feed(self, text: str) -> StopResult:
        """Add text.

        Raises:
          ValueError: a stop string was found before.
        """
        if self._matched is not None:
            raise ValueError(f"feed must not be called after a stop; got one at {self._matched!r}")
        held_before = len(self._pending)
        text = self._pending + text
        end, self._matched = self._first_match(text)
        if self._matched is not None:
            self._pending = ""
            kept = end if self._includes else end - len(self._matched)
            return StopResult(text[held_before if self._includes else 0 : kept], self._matched)
        self._pending = text[self._start_of_pending(text) :]
        if self._includes:
            return StopResult(text[held_before:])
        return StopResult(text[: len(text) - len(self._pending)])

    def flush(self) -> str:
        """The text held back, at the end of a sequence that met no stop string."""
        held, self._pending = self._pending, ""
        return "" if self._includes else held

    def _first_match(self, text: str) -> tuple[int, str | None]:
        """End and text of the match that is complete first."""
        found = [(text.find(stop) + len(stop), stop) for stop in self._stop if stop in text]
        return min(found, key=lambda match: (match[0], -len(match[1])), default=(0, None))

    def _start_of_pending(self, text: str) -> int:
        first = max(0, len(text) - self._longest + 1)
        for start in range(first, len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stop):
                return start
        return len(text)
