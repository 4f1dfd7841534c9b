"""PlainTextEncoder: encodes text in which control tokens are nothing but text."""

import copy
import functools
import re

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from jaxserve.errors import InvalidRequestError


def check_unicode(text: str) -> None:
    """Check that a text can be encoded at all.

    Raises:
      InvalidRequestError: it holds half a surrogate pair, as broken JSON or bytes give.
    """
    try:
        if not text.isascii():
            text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = text[error.start : error.start + 1]
        raise InvalidRequestError.for_field("text", "must be valid Unicode", half) from error


def encode_unlocked(backend: Backend, text: str, *, add_special_tokens: bool) -> list[int]:
    """Encode a text while other threads run.

    The backend's `encode` holds the GIL: 2 s for 1 MiB, in which a server answers nobody. Its
    batches do not, and this one, without offsets, takes half the time.
    """
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


class PlainTextEncoder:
    """Encodes with a tokenizer's own model, but never into one of the control tokens."""

    def __init__(self, backend: Backend, control_tokens: frozenset[str], unknown: str | None):
        """Set up; the model is shared with the backend, nothing of it is copied.

        Args:
          backend: the tokenizer.
          control_tokens: texts of added tokens that are to be plain text.
          unknown: the token for what a Unigram vocabulary lacks; other models name their own.
        """
        self._backend = backend
        added = sorted(backend.get_added_tokens_decoder().items())
        kept = [(i, token) for i, token in added if token.content not in control_tokens]
        self._first = Backend(backend.model)
        self._later = Backend(backend.model)
        for plain in (self._first, self._later):
            if backend.normalizer is not None:
                plain.normalizer = backend.normalizer
            if backend.pre_tokenizer is not None:
                plain.pre_tokenizer = backend.pre_tokenizer
            plain.add_tokens([token for _, token in kept])
        if backend.pre_tokenizer is not None:
            self._later.pre_tokenizer = _without_prefix_space(backend.pre_tokenizer)
        # Added tokens outside the model's vocabulary may have got other ids here.
        ids = ((self._first.token_to_id(token.content), i) for i, token in kept)
        self._renumbered = {plain_id: i for plain_id, i in ids if plain_id not in (None, i)}
        if not isinstance(backend.model, models.Unigram):
            unknown = getattr(backend.model, "unk_token", None)
        self._forbidden = {i for i, t in added if t.content in control_tokens - {unknown}}
        self._forbidden_texts = [t.content for i, t in added if i in self._forbidden]

    def encode(self, text: str, *, is_first: bool = True) -> list[int]:
        """Encode a text.

        Args:
          text: any text.
          is_first: whether it begins the prompt, where SentencePiece puts a space in front.

        Raises:
          InvalidRequestError: the tokenizer makes a control token of plain text, even of its
            parts; or the text is no valid Unicode.
        """
        check_unicode(text)
        ids = self._encode(text, is_first)
        if self._forbidden.isdisjoint(ids):
            return ids
        # Some models hold control tokens in their vocabulary and match them there: cut them.
        ids = []
        for index, piece in enumerate(self._cuts.split(text)):
            ids += self._encode(piece, is_first and index == 0)
        if not self._forbidden.isdisjoint(ids):
            raise InvalidRequestError(
                "text must not hold a control token that the tokenizer makes of plain text"
            )
        return ids

    def _encode(self, text: str, is_first: bool) -> list[int]:
        plain = self._first if is_first else self._later
        ids = encode_unlocked(plain, text, add_special_tokens=False)
        if not self._renumbered:
            return ids
        return [self._renumbered.get(token_id, token_id) for token_id in ids]

    @functools.cached_property
    def _cuts(self) -> re.Pattern[str]:
        """Matches the empty place behind the first character of each control token."""
        rests = "|".join(
            f"(?<={re.escape(text[0])})(?={re.escape(text[1:])})" for text in self._forbidden_texts
        )
        return re.compile(rests)


def _without_prefix_space(
    pre_tokenizer: pre_tokenizers.PreTokenizer,
) -> pre_tokenizers.PreTokenizer:
    """A copy that puts no space in front of a text that does not begin the prompt."""
    copied = copy.deepcopy(pre_tokenizer)
    if isinstance(copied, pre_tokenizers.Metaspace) and copied.prepend_scheme == "first":
        copied.prepend_scheme = "never"
    return copied
