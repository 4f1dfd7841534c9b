"""One sequence as its client sees it: text, kept tokens, log-probabilities, and how it ended."""

from dataclasses import dataclass, field

from jaxserve.outputs import CompletionOutput, Logprob
from jaxserve.request import FinishReason, Request
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.step import SequenceUpdate, TokenLogprobs
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.stop_strings import StopStrings
from jaxserve.text.text_stream import TextStream
from jaxserve.text.tokenizer import Tokenizer


def gathers_until_end(params: SamplingParams) -> bool:
    """Whether nothing is shown of a request before its end, and no text can end it."""
    is_final_only = params.output_kind is RequestOutputKind.FINAL_ONLY
    return is_final_only and not params.stop_strings and params.logprobs is None


@dataclass(slots=True, kw_only=True, eq=False)
class SequenceOutput:
    """Text, tokens and log-probabilities of one sequence, and how much its client has of them.

    Attributes:
      index: which of the request's sequences.
      params: of the request.
      tokenizer: None when no text is wanted.
      stream: makes the text; None when no text is wanted.
      gathers: see `gathers_until_end`; then tokens only gather, and the text is made of all of
        them when the last update comes.
      text: so far, without what is held back because it may become a stop string.
      token_ids: so far, all kept.
      num_sent_chars, num_sent_tokens: what `make_completion` has shown.
      has_sent_end: whether it has shown the finish reason.
    """

    index: int
    params: SamplingParams
    tokenizer: Tokenizer | None
    stream: TextStream | None
    gathers: bool
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_preemptions: int = 0
    num_sent_chars: int = 0
    num_sent_tokens: int = 0
    has_sent_end: bool = False

    @classmethod
    def start(cls, request: Request, index: int, tokenizer: Tokenizer | None) -> "SequenceOutput":
        """Begin with no tokens; without a tokenizer the text stays empty."""
        params = request.sampling_params
        stream = None
        if tokenizer is not None:
            detokenizer = Detokenizer(
                tokenizer,
                request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
            stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)
            stream = TextStream(detokenizer, stops, params.min_tokens)
        has_logprobs = params.logprobs is not None
        return cls(
            index=index,
            params=params,
            tokenizer=tokenizer,
            stream=stream,
            gathers=gathers_until_end(params),
            logprobs=[] if has_logprobs else None,
            cumulative_logprob=0.0 if has_logprobs else None,
        )

    @property
    def is_finished(self) -> bool:
        """Whether the client's view is complete; the engine may still work on it."""
        return self.finish_reason is not None

    @property
    def is_due(self) -> bool:
        """Whether the client is to hear of it now."""
        num_unsent = len(self.token_ids) - self.num_sent_tokens
        if self.is_finished:
            return not self.has_sent_end
        if self.num_sent_tokens == 0:
            return num_unsent > 0
        return num_unsent >= (self.params.stream_interval or 1)

    def take(self, update: SequenceUpdate) -> str | None:
        """Take in an update; returns the stop string that its text completed, if any.

        Of updates that do not end a sequence that gathers, only the tokens are kept instead.
        """
        self.num_preemptions = max(self.num_preemptions, update.num_preemptions)
        num_kept, stop = self._take_text(update)
        if self.logprobs is not None:
            self._take_logprobs(update, num_kept)
        self.token_ids.extend(update.new_token_ids[:num_kept])
        if stop is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, stop
        elif update.finish_reason is not None:
            self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason
            self.error = update.error
        return stop

    def fail(self, message: str) -> None:
        """End it as an error."""
        self.finish_reason, self.error = FinishReason.ERROR, message

    def _take_text(self, update: SequenceUpdate) -> tuple[int, str | None]:
        """Add the text; returns how many of the new tokens are kept, and the stop string."""
        token_ids = update.new_token_ids
        if self.stream is None:
            return len(token_ids), None
        is_stop = update.finish_reason is FinishReason.STOP
        if is_stop and not self.params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        if self.gathers:
            token_ids = (*self.token_ids, *token_ids)
        if token_ids:
            delta = self.stream.feed(token_ids)
            self.text += delta.text
            if delta.stop is not None:
                return delta.num_kept_tokens, delta.stop
        stop = None
        if update.finish_reason is not None:
            delta = self.stream.flush()
            self.text += delta.text
            stop = delta.stop
        return len(update.new_token_ids), stop

    def _take_logprobs(self, update: SequenceUpdate, num_kept: int) -> None:
        assert self.logprobs is not None and self.cumulative_logprob is not None
        entries = (update.logprobs or ())[:num_kept]
        tokens = zip(update.new_token_ids[:num_kept], entries, strict=True)
        self.logprobs += [self._make_logprobs(token_id, entry) for token_id, entry in tokens]
        self.cumulative_logprob += sum(entry.logprob for entry in entries)

    def _make_logprobs(self, token_id: int, entry: TokenLogprobs) -> dict[int, Logprob]:
        """Put the chosen token first, then the most likely ones, best first."""
        made = {token_id: Logprob(entry.logprob, entry.rank, self._decode(token_id))}
        top = list(zip(entry.top_ids, entry.top_logprobs, strict=True))
        for rank, (top_id, logprob) in enumerate(top[: self.params.logprobs], start=1):
            if top_id not in made:
                made[top_id] = Logprob(logprob, rank, self._decode(top_id))
        return made

    def _decode(self, token_id: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.token_text(token_id)

    def make_completion(self) -> CompletionOutput:
        """Show all so far, or what is new since the last call when deltas were asked for."""
        is_delta = self.params.output_kind is RequestOutputKind.DELTA
        num_chars, num_tokens = (self.num_sent_chars, self.num_sent_tokens) if is_delta else (0, 0)
        self.num_sent_chars, self.num_sent_tokens = len(self.text), len(self.token_ids)
        self.has_sent_end = self.is_finished
        return CompletionOutput(
            index=self.index,
            text=self.text[num_chars:],
            token_ids=self.token_ids[num_tokens:],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[num_tokens:],
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            stop_reason=self.stop_reason,
            error=self.error,
        )
