"""What all answers share: usage, log-probabilities, times and names."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxserve.errors import QueueTimeoutError, RowError
from jaxserve.outputs import CompletionOutput, Logprob, RequestOutput
from jaxserve.request import FinishReason

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""

type TokenLogprobs = list[dict[int, Logprob]]

encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStyle:
    """How a server and a request want answers.

    Attributes:
      response_id: such as "chatcmpl-...".
      model: the name shown.
      created: seconds since 1970.
      system_fingerprint: of server and model.
      role: of chat answers.
      shows_ids_as_tokens: show tokens of log-probabilities as "token_id:N".
      returns_token_ids: tell the ids of prompt and outputs.
      returns_prompt_text: tell the text of a chat's prompt.
      tells_cached_tokens: tell `prompt_tokens_details`.
    """

    response_id: str
    model: str
    created: int
    system_fingerprint: str | None = None
    role: str = "assistant"
    shows_ids_as_tokens: bool = False
    returns_token_ids: bool = False
    returns_prompt_text: bool = False
    tells_cached_tokens: bool = False


class PromptTokensDetails(msgspec.Struct):
    """Of the prompt's tokens."""

    cached_tokens: int


class Usage(msgspec.Struct, omit_defaults=True):
    """Tokens of a request."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class TopLogprob(msgspec.Struct):
    """One of the most likely tokens of a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    """The token of a position of a chat's answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a chat's answer."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities of a completion, a list for each property."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


def now_seconds() -> int:
    """Wall-clock seconds since 1970; nothing but `created` may depend on them."""
    return int(time.time())


def make_usage(num_prompt: int, num_output: int, num_cached: int | None) -> Usage:
    """The usage of a request; cached tokens are told when they are not None."""
    details = None if num_cached is None else PromptTokensDetails(num_cached)
    return Usage(num_prompt, num_prompt + num_output, num_output, details)


def usage_of(outputs: Sequence[RequestOutput], style: AnswerStyle) -> Usage:
    """The usage of finished requests; a prompt counts once, whatever `n` is."""
    num_prompt = sum(len(output.prompt_token_ids or ()) for output in outputs)
    num_output = sum(len(part.token_ids) for output in outputs for part in output.outputs)
    num_cached = sum(output.num_cached_tokens or 0 for output in outputs)
    return make_usage(num_prompt, num_output, num_cached if style.tells_cached_tokens else None)


def check_output(output: CompletionOutput) -> None:
    """Raise what a failed sequence has for its client.

    Raises:
      RowError: the sequence has failed.
    """
    if output.finish_reason == FinishReason.ERROR:
        raise RowError(output.error or "the sequence has failed")


def waited_in_vain(output: RequestOutput) -> bool:
    """Whether a request has ended by its timeout before any of its sequences ran."""
    was_scheduled = output.metrics is None or output.metrics.scheduled_ts is not None
    return (
        output.finished
        and not was_scheduled
        and all(part.finish_reason == FinishReason.TIMEOUT for part in output.outputs)
    )


def check_scheduled(outputs: Sequence[RequestOutput]) -> None:
    """Raise what there is to say where no request ran; where one did, the others' ends tell.

    Raises:
      QueueTimeoutError: all of them waited in vain.
    """
    if all(map(waited_in_vain, outputs)):
        raise QueueTimeoutError(
            "the request must run before its timeout and within max_queue_time; it only waited: "
            "ask again later"
        )


def chat_logprobs(output: CompletionOutput, num_top: int, style: AnswerStyle) -> Any:
    """Log-probabilities as chats show them; None when there are none."""
    if output.logprobs is None:
        return None
    content: list[ChatTokenLogprob] = []
    for token_id, entries in zip(output.token_ids, output.logprobs, strict=True):
        chosen = _top(token_id, entries[token_id], style)
        top = [_top(i, entry, style) for i, entry in _most_likely(entries, num_top)]
        content.append(ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top))
    return ChatLogprobs(content)


def completion_logprobs(
    output: CompletionOutput, num_top: int, offset: int, style: AnswerStyle
) -> CompletionLogprobs | None:
    """Log-probabilities as completions show them; None when there are none.

    Args:
      output: of one sequence, all of it or what is new.
      num_top: most likely tokens of each position.
      offset: where the first token stands in the text.
      style: how tokens are shown.
    """
    if output.logprobs is None:
        return None
    made = CompletionLogprobs([], [], [], [])
    for token_id, entries in zip(output.token_ids, output.logprobs, strict=True):
        text = _token_text(token_id, entries[token_id], style)
        made.text_offset.append(offset)
        made.token_logprobs.append(_finite(entries[token_id].logprob))
        made.tokens.append(text)
        shown = {token_id: entries[token_id], **dict(_most_likely(entries, num_top))}
        made.top_logprobs.append(
            {_token_text(i, entry, style): _finite(entry.logprob) for i, entry in shown.items()}
        )
        offset += len(text)
    return made


def _most_likely(entries: dict[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    """The most likely tokens, best first; the chosen one is among them only if it is likely."""
    ranked = [item for item in entries.items() if item[1].rank and item[1].rank <= num_top]
    ranked.sort(key=lambda item: item[1].rank or 0)
    return ranked[:num_top]


def _top(token_id: int, entry: Logprob, style: AnswerStyle) -> TopLogprob:
    text = _token_text(token_id, entry, style)
    return TopLogprob(text, _finite(entry.logprob), list(text.encode("utf-8", "replace")))


def _token_text(token_id: int, entry: Logprob, style: AnswerStyle) -> str:
    if style.shows_ids_as_tokens or entry.decoded_token is None:
        return f"token_id:{token_id}"
    return entry.decoded_token


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB  # also of NaN
