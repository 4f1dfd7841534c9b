"""What each token adds to the decoded text, so that text can be joined token by token.

`tokenizers.decoders.DecodeStream` is not used: when the prompt ends inside a character it gives the
whole prompt back as the first piece (seen with 0.23.3), and it has no way to ask for what it holds
back at the end. The joiners here give exactly the text of `Tokenizer.decode`.
"""

import codecs
import functools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

from models.errors import ModelLoadError

REPLACEMENT = "\ufffd"


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


class Joiner(ABC):
    """Joins the tokens of one sequence to text; what it has given out never changes."""

    @abstractmethod
    def prime(self, forward: Iterable[str], backward: Iterable[str]) -> None:
        """Take the prompt's tokens as context; their complete text is not given out.

        Args:
          forward: the tokens, lazily, so that a long prompt costs nothing.
          backward: the same ones from the last to the first.
        """

    @abstractmethod
    def feed(self, token: str) -> str:
        """Add a token as it stands in the vocabulary; the text that became stable."""

    def feed_all(self, tokens: Iterable[str]) -> str:
        """Add tokens as `feed` does one by one; the text that became stable."""
        return "".join(map(self.feed, tokens))

    @abstractmethod
    def feed_raw(self, text: str) -> str:
        """Add a token whose text is not to be decoded; the text that became stable."""

    @abstractmethod
    def flush(self) -> str:
        """The text that was still open, broken characters as U+FFFD."""


class ByteLevelJoiner(Joiner):
    """For byte-level BPE: the text is the UTF-8 decoding of all bytes."""

    def __init__(self) -> None:
        """Start without context."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def prime(self, forward: Iterable[str], backward: Iterable[str]) -> None:
        """See Joiner; only the last 3 bytes can still be open, 8 are taken, from whole tokens."""
        tail: list[bytes] = []
        num_bytes = 0
        for token in backward:
            tail.append(_bytes_of(token))
            num_bytes += len(tail[-1])
            if num_bytes >= 8:
                break
        self._decoder.decode(b"".join(reversed(tail)))

    def feed(self, token: str) -> str:
        """See Joiner."""
        return self._decoder.decode(_bytes_of(token))

    def feed_all(self, tokens: Iterable[str]) -> str:
        """See Joiner."""
        return self._decoder.decode(b"".join(map(_bytes_of, tokens)))

    def feed_raw(self, text: str) -> str:
        """See Joiner."""
        return self._decoder.decode(text.encode("utf-8", "replace"))

    def flush(self) -> str:
        """See Joiner."""
        return self._decoder.decode(b"", final=True)


@functools.lru_cache(maxsize=1 << 18)
def _bytes_of(token: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF_CHAR.__getitem__, token))
    except KeyError:  # an added token, written as it is
        return token.encode("utf-8", "replace")


class FallbackJoiner(Joiner):
    """For SentencePiece-like vocabularies: texts, and runs of <0xNN> tokens.

    A run is decoded as a whole: one byte that does not fit turns every byte of it into U+FFFD. So
    a run is given out when the next token shows that it has ended.
    """

    def __init__(self, replacements: Sequence[tuple[str, str]], num_stripped: int, has_bytes: bool):
        """Start without context.

        Args:
          replacements: texts that stand for others inside a token, as "▁" for " ".
          num_stripped: spaces dropped from the very beginning of the text.
          has_bytes: whether <0xNN> stands for a byte.
        """
        self._replacements, self._has_bytes = replacements, has_bytes
        self._num_to_strip = num_stripped
        self._run = bytearray()

    def prime(self, forward: Iterable[str], backward: Iterable[str]) -> None:
        """See Joiner; of a run of bytes at the end only the open character is context."""
        for token in forward:
            if self._num_to_strip == 0:
                break
            self.feed(token)
        run: list[int] = []
        for token in backward:
            byte = self._byte(token)
            if byte is None:
                break
            run.append(byte)
        open_tail = _open_tail(bytes(reversed(run)))
        if len(open_tail) < len(run):
            self._num_to_strip = 0
        self._run = bytearray(open_tail)

    def feed(self, token: str) -> str:
        """See Joiner."""
        byte = self._byte(token)
        if byte is not None:
            self._run.append(byte)
            return ""
        for old, new in self._replacements:
            token = token.replace(old, new)
        return self.feed_raw(token)

    def feed_raw(self, text: str) -> str:
        """See Joiner."""
        return self._strip(self._end_run() + text)

    def flush(self) -> str:
        """See Joiner."""
        return self._strip(self._end_run())

    def _byte(self, token: str) -> int | None:
        if not self._has_bytes or not re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
            return None
        return int(token[3:5], 16)

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _strip(self, text: str) -> str:
        while text and self._num_to_strip:
            if not text.startswith(" "):
                self._num_to_strip = 0
                break
            text = text[1:]
            self._num_to_strip -= 1
        return text


def _open_tail(run: bytes) -> bytes:
    """The bytes of an unfinished character at the end of a run that is valid before it."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    try:
        decoder.decode(run)
    except UnicodeDecodeError:
        return b""
    return decoder.getstate()[0]


class MetaspaceJoiner(Joiner):
    """For Unigram vocabularies: "▁" is a space, except in the first token of the text."""

    def __init__(self, replacement: str, drops_first: bool):
        """Start without context.

        Args:
          replacement: the character that stands for a space.
          drops_first: whether the first token loses its own.
        """
        self._replacement, self._is_first = replacement, drops_first

    def prime(self, forward: Iterable[str], backward: Iterable[str]) -> None:
        """See Joiner."""
        self._is_first = self._is_first and next(iter(forward), None) is None

    def feed(self, token: str) -> str:
        """See Joiner."""
        return self.feed_raw(token.replace(self._replacement, "" if self._is_first else " "))

    def feed_raw(self, text: str) -> str:
        """See Joiner."""
        self._is_first = False
        return text

    def flush(self) -> str:
        """See Joiner: nothing is ever open."""
        return ""


class WordJoiner(Joiner):
    """For tokenizers without a decoder: tokens with spaces between them."""

    def __init__(self) -> None:
        """Start without context."""
        self._is_first = True

    def prime(self, forward: Iterable[str], backward: Iterable[str]) -> None:
        """See Joiner."""
        self._is_first = next(iter(forward), None) is None

    def feed(self, token: str) -> str:
        """See Joiner."""
        return self.feed_raw(token if self._is_first else f" {token}")

    def feed_raw(self, text: str) -> str:
        """See Joiner."""
        self._is_first = False
        return text

    def flush(self) -> str:
        """See Joiner: nothing is ever open."""
        return ""


def joiner_maker(backend: Backend) -> "JoinerMaker":
    """Find out which joiner gives the text of a tokenizer's decoder.

    Raises:
      ModelLoadError: the decoder is of a kind that cannot be joined token by token here.
    """
    if backend.decoder is None:
        return JoinerMaker({"type": "None"})
    return JoinerMaker(json.loads(backend.decoder.__getstate__()))


class JoinerMaker:
    """Makes joiners for one decoder, which is looked at once."""

    def __init__(self, decoder: dict[str, Any]):
        """Check the decoder's own JSON; see joiner_maker."""
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        self._steps: list[dict[str, Any]] = steps
        self._names = [step["type"] for step in steps]
        if len(steps) == 1 and self._names[0] in ("ByteLevel", "Metaspace", "None"):
            return
        strips = [step for step in steps if step["type"] == "Strip"]
        if (
            not set(self._names) <= {"Replace", "ByteFallback", "Fuse", "Strip"}
            or any("String" not in step["pattern"] for step in self._named("Replace"))
            or (strips and self._names[-2:] != ["Fuse", "Strip"])
            or any(step["content"] != " " or step["stop"] for step in strips)
        ):
            raise ModelLoadError(
                "tokenizer.json: decoder: must be ByteLevel, Metaspace, or Replace, ByteFallback, "
                f"Fuse and Strip of leading spaces; got {self._names}"
            )

    def make(self) -> Joiner:
        """A joiner for a new sequence."""
        if self._names == ["ByteLevel"]:
            return ByteLevelJoiner()
        if self._names == ["Metaspace"]:
            step = self._steps[0]
            return MetaspaceJoiner(step["replacement"], step["prepend_scheme"] != "never")
        if self._names == ["None"]:
            return WordJoiner()
        return FallbackJoiner(
            [(step["pattern"]["String"], step["content"]) for step in self._named("Replace")],
            sum(step["start"] for step in self._named("Strip")),
            "ByteFallback" in self._names,
        )

    def _named(self, name: str) -> Iterable[dict[str, Any]]:
        return [step for step in self._steps if step["type"] == name]
