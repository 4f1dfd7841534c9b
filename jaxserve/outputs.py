"""What a client receives: RequestOutput, its CompletionOutputs, log-probabilities and times."""

import functools
import html
import logging
from dataclasses import dataclass, field, fields, replace
from typing import Any

logger = logging.getLogger(__name__)

_LONGEST_LIST = 8


@functools.cache
def _warn_of_unknown(class_name: str, names: tuple[str, ...]) -> None:
    logger.warning("%s ignores the unknown arguments %s", class_name, ", ".join(names))


def _ignore_unknown_arguments[T](cls: type[T]) -> type[T]:
    """Let a dataclass be made with keywords of a later release: one warning, no error."""
    make = cls.__init__
    known = {item.name for item in fields(cls)}  # type: ignore[arg-type]

    @functools.wraps(make)
    def __init__(self: T, *args: Any, **kwargs: Any) -> None:
        try:  # and not a comparison beforehand: one is made for each token of each stream
            make(self, *args, **kwargs)
        except TypeError:
            if kwargs.keys() <= known:
                raise
            _warn_of_unknown(cls.__name__, tuple(sorted(kwargs.keys() - known)))
            make(self, *args, **{name: kwargs[name] for name in kwargs.keys() & known})

    cls.__init__ = __init__
    return cls


def _show(value: object) -> str:
    """Shorten a long list of tokens; all else is shown whole."""
    if isinstance(value, list | tuple) and len(value) > _LONGEST_LIST:
        head = ", ".join(map(repr, value[:_LONGEST_LIST]))
        return f"[{head}, ... {len(value)} in all]"
    return repr(value)


def _show_fields(item: Any) -> str:
    """Show a dataclass without the fields that hold None."""
    pairs = ((part.name, getattr(item, part.name)) for part in fields(item))
    shown = (f"{name}={_show(value)}" for name, value in pairs if value is not None)
    return f"{type(item).__name__}({', '.join(shown)})"


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position.

    Attributes:
      logprob: natural logarithm of the probability.
      rank: 1 = most likely.
      decoded_token: the token's text by itself; None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class RequestStateStats:
    """Times and counts of one request; all times are seconds of one monotonic clock.

    Attributes:
      num_generation_tokens: output tokens of all its sequences, as the client counts them.
      num_preemptions: how often its sequences lost their pages and were computed again.
      arrival_time: when the request arrived.
      queued_ts: when it was handed to the engine.
      scheduled_ts: when the engine first computed a part of it; None where it is not told.
      first_token_ts: when its first token came; None before.
      last_token_ts: when its newest token came; None before.
      first_token_latency: seconds from arrival to the first token; None before.
    """

    num_generation_tokens: int = 0
    num_preemptions: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float | None = None
    first_token_ts: float | None = None
    last_token_ts: float | None = None
    first_token_latency: float | None = None

    def copy(self) -> "RequestStateStats":
        """What they are now; in a quarter of copy.copy's time, for each token of each stream."""
        copied = object.__new__(RequestStateStats)
        copied.__dict__.update(self.__dict__)
        return copied


@_ignore_unknown_arguments
@dataclass(repr=False)
class CompletionOutput:
    """One of the `n` sequences of a request.

    Attributes:
      index: which of the `n`.
      text: decoded output; without the stop string unless it was asked for.
      token_ids: output tokens; the one that ended the sequence is among them.
      cumulative_logprob: sum of the log-probabilities of `token_ids`; None when not asked for.
      logprobs: for each of `token_ids`, {id: Logprob} of the chosen and the most likely tokens
        (one entry more than asked when the chosen one is not among them); None when not asked.
      finish_reason: "stop", "length", "abort", "error" or "timeout"; None while unfinished.
      stop_reason: the stop string or token id; None for end of sequence and other reasons.
      error: what went wrong when `finish_reason` is "error".
      routed_experts, lora_request, sampling_mask, spec_decode_metrics, weight_versions: None
        until an engine fills them.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    routed_experts: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None
    sampling_mask: Any = None
    spec_decode_metrics: Any = None
    weight_versions: Any = None
    error: str | None = None

    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    def extend(self, newer: "CompletionOutput") -> None:
        """Append a later delta of the same sequence."""
        self.text += newer.text
        self.token_ids.extend(newer.token_ids)
        if newer.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.extend(newer.logprobs)
        self.cumulative_logprob = newer.cumulative_logprob
        self.finish_reason, self.stop_reason = newer.finish_reason, newer.stop_reason
        self.error = newer.error

    def __repr__(self) -> str:
        """Show what is set; long lists of tokens are shortened."""
        return _show_fields(self)


@_ignore_unknown_arguments
@dataclass(repr=False)
class RequestOutput:
    """What a request has produced.

    Attributes:
      request_id: of the request.
      prompt: its text; None when only ids were given.
      prompt_token_ids: its ids.
      outputs: its sequences by index; of a delta only those with news.
      finished: whether all sequences are finished.
      metrics: times and counts.
      num_cached_tokens: prompt tokens whose keys and values were found in the prefix cache.
      prompt_logprobs, prompt_token_id_logprobs, lora_request, encoder_prompt,
        encoder_prompt_token_ids, num_cache_creation_tokens, kv_transfer_params,
        ec_transfer_params: None until an engine fills them.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestStateStats | None = None
    lora_request: Any = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    num_cache_creation_tokens: int | None = None
    prompt_token_id_logprobs: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None

    def add(self, next_output: "RequestOutput", aggregate: bool) -> None:
        """Take in a later output of the same request.

        Args:
          next_output: the later one.
          aggregate: append its texts and tokens (deltas) instead of replacing them (cumulative).
        """
        self.finished |= next_output.finished
        if next_output.metrics is not None:
            self.metrics = next_output.metrics
        position_of = {output.index: i for i, output in enumerate(self.outputs)}
        for newer in next_output.outputs:
            position = position_of.get(newer.index)
            if position is None:
                logprobs = None if newer.logprobs is None else list(newer.logprobs)
                copied = replace(newer, token_ids=list(newer.token_ids), logprobs=logprobs)
                self.outputs.append(copied)
            elif aggregate:
                self.outputs[position].extend(newer)
            else:
                self.outputs[position] = newer
        self.outputs.sort(key=lambda output: output.index)

    def __repr__(self) -> str:
        """Show what is set; long lists of tokens are shortened."""
        return _show_fields(self)

    def _repr_html_(self) -> str:
        """Show prompt and texts as a table in a notebook; everything of the model is escaped."""
        rows = [
            ("prompt", self.prompt if self.prompt is not None else _show(self.prompt_token_ids))
        ]
        for output in self.outputs:
            reason = f" ({output.finish_reason})" if output.finished() else ""
            text = output.text if output.error is None else f"{output.text}\n{output.error}"
            rows.append((f"output {output.index}{reason}", text))
        cells = "".join(
            f'<tr><th style="text-align:left;vertical-align:top">{html.escape(name)}</th>'
            '<td style="text-align:left;white-space:pre-wrap;overflow-wrap:anywhere">'
            f"{html.escape(text)}</td></tr>"
            for name, text in rows
        )
        return f"<table>{cells}</table>"
