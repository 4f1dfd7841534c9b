"""TextStream: the tokens of one sequence become text, up to the first stop string."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The text that some tokens added.

    Attributes:
      text: may go to the client; never taken back.
      stop: the stop string that ended the text, None while there is none.
      num_kept_tokens: tokens of this feed up to and including the one that completed the stop
        string; all of them when there is none. What comes after them is to be dropped.
    """

    text: str
    stop: str | None = None
    num_kept_tokens: int = 0


class TextStream:
    """Joins the Detokenizer and the StopStrings of one sequence.

    Tokens are looked at one by one, so text, stop and kept tokens do not depend on how many
    tokens a step brings.
    """

    def __init__(self, detokenizer: Detokenizer, stop_strings: StopStrings, min_tokens: int = 0):
        """Start with the first output token.

        Args:
          detokenizer: of this sequence, not fed yet.
          stop_strings: of this sequence, not fed yet.
          min_tokens: stop strings are not looked for in the text of so many first tokens.
        """
        self._detokenizer, self._stop_strings = detokenizer, stop_strings
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def feed(self, token_ids: Sequence[int]) -> TextDelta:
        """Add output tokens.

        Raises:
          ValueError: a stop string was found before.
        """
        if self._stop_strings.is_empty:
            return TextDelta(self._detokenizer.feed(token_ids), None, len(token_ids))
        parts: list[str] = []
        for count, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            text = self._detokenizer.feed((token_id,))
            if self._num_tokens <= self._min_tokens:
                parts.append(text)
                continue
            result = self._stop_strings.feed(text)
            parts.append(result.emit)
            if result.matched is not None:
                return TextDelta("".join(parts), result.matched, count)
        return TextDelta("".join(parts), None, len(token_ids))

    def flush(self) -> TextDelta:
        """The text held back, when the sequence ended without a stop string.

        The stop of the result is set when the held text completes one after all; after a stop
        nothing is left.
        """
        if self._stop_strings.matched is not None:
            return TextDelta("")
        text = self._detokenizer.flush()
        if self._stop_strings.is_empty or self._num_tokens <= self._min_tokens:
            return TextDelta(text)
        result = self._stop_strings.feed(text)
        if result.matched is not None:
            return TextDelta(result.emit, result.matched)
        return TextDelta(result.emit + self._stop_strings.flush())
