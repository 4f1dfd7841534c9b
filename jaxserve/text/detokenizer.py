"""Detokenizer: the text of one sequence, token by token, never taken back."""

from collections.abc import Iterable, Iterator, Sequence

from jaxserve.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns a sequence's output tokens into text as they come.

    The deltas of `feed` and `flush`, joined, are what `Tokenizer.decode` of prompt and output adds
    to the prompt's complete characters: a character that the prompt began and the output ends is
    in the first delta, and so is the space that SentencePiece drops at the start of a text only.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ):
        """Start after a prompt.

        Args:
          tokenizer: whose ids are fed.
          prompt_token_ids: context; its text is not given out.
          skip_special_tokens: leave special tokens out of the text.
          spaces_between_special_tokens: keep the space that the tokenizer's decoder puts before
            an added token which directly follows another one. Decoders of today's decoder-only
            models put none; those that join tokens with spaces do.
        """
        self._tokenizer = tokenizer
        self._skipped_ids = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._keeps_spaces = skip_special_tokens or spaces_between_special_tokens
        self._was_added = False
        self._joiner = tokenizer.make_joiner()
        self._joiner.prime(self._tokens(prompt_token_ids), self._tokens(reversed(prompt_token_ids)))

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens.

        Args:
          token_ids: the next ids, any number; ids without a token add no text.

        Returns:
          The text that became stable.
        """
        if self._keeps_spaces:
            return self._joiner.feed_all(self._tokens(token_ids))
        return "".join(map(self._feed_spaceless, token_ids))

    def flush(self) -> str:
        """The text that was held back, broken characters as U+FFFD; call it once, at the end."""
        return self._joiner.flush()

    def _feed_spaceless(self, token_id: int) -> str:
        """Feed one id; an added token right behind another one joins it without a space."""
        token = next(self._tokens((token_id,)), None)
        if token is None:
            return ""
        is_added = token_id in self._tokenizer.added_tokens
        feed = self._joiner.feed_raw if is_added and self._was_added else self._joiner.feed
        self._was_added = is_added
        return feed(token)

    def _tokens(self, token_ids: Iterable[int]) -> Iterator[str]:
        """What stands in the vocabulary for the ids that are shown and have a token."""
        skipped, token_of = self._skipped_ids, self._tokenizer.vocabulary_token
        return (
            token
            for token_id in token_ids
            if token_id not in skipped and (token := token_of(token_id)) is not None
        )
