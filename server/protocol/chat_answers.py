"""Answers of /v1/chat/completions: the whole one, and the events of a stream."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from jaxserve.outputs import CompletionOutput, RequestOutput
from server.protocol.answers import (
    AnswerStyle,
    Usage,
    chat_logprobs,
    check_output,
    encoder,
    usage_of,
)
from server.protocol.chat import ChatRequest
from server.protocol.chunks import ChunkWriter


class ChatMessage(msgspec.Struct):
    """What the model says."""

    role: str
    content: str
    reasoning: None = None
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """One of the answers."""

    index: int
    message: ChatMessage
    logprobs: Any
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatResponse(msgspec.Struct, kw_only=True):
    """The body of an answer."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | None | UnsetType = UNSET
    prompt_text: str | None | UnsetType = UNSET


class _Delta(msgspec.Struct, omit_defaults=True):
    content: str
    role: str | None = None


class _ChunkChoice(msgspec.Struct):
    index: int
    delta: _Delta
    logprobs: Any
    finish_reason: str | None
    stop_reason: int | str | None | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


def chat_response(request: ChatRequest, output: RequestOutput, style: AnswerStyle) -> ChatResponse:
    """The answer of a finished chat.

    Args:
      request: of the client.
      output: of the engine, all of it.
      style: of the answer.

    Raises:
      RowError: a sequence has failed.
    """
    choices: list[ChatChoice] = []
    for part in output.outputs:
        check_output(part)
        choices.append(
            ChatChoice(
                index=part.index,
                message=ChatMessage(style.role, part.text),
                logprobs=chat_logprobs(part, request.top_logprobs or 0, style),
                finish_reason=part.finish_reason,
                stop_reason=part.stop_reason,
                token_ids=part.token_ids if style.returns_token_ids else UNSET,
            )
        )
    return ChatResponse(
        id=style.response_id,
        created=style.created,
        model=style.model,
        choices=choices,
        usage=usage_of([output], style),
        system_fingerprint=style.system_fingerprint,
        prompt_token_ids=output.prompt_token_ids if style.returns_token_ids else UNSET,
        prompt_text=output.prompt if style.returns_prompt_text else UNSET,
    )


class ChatStream:
    """Makes the events of one streamed chat."""

    def __init__(self, request: ChatRequest, style: AnswerStyle, *, forces_usage: bool = False):
        self._chunks = ChunkWriter(
            "chat.completion.chunk", style, request.stream_options, forces_usage=forces_usage
        )
        self._style, self._num_top = style, request.top_logprobs or 0
        self._started: set[int] = set()

    def events(self, prompt_index: int, output: RequestOutput) -> bytes:
        """The events of what is new.

        Raises:
          RowError: a sequence has failed.
        """
        more = self._first_fields(output) if self._chunks.count(prompt_index, output) else {}
        events: list[bytes] = []
        for part in output.outputs:
            check_output(part)
            if part.index not in self._started:
                self._started.add(part.index)
                opening = _ChunkChoice(part.index, _Delta("", self._style.role), None, None)
                events.append(self._chunks.chunk(encoder.encode(opening), **more))
                more = {}
            if choice := self._choice(part):
                events.append(self._chunks.chunk(choice))
        return b"".join(events)

    def last_events(self) -> bytes:
        """The end of the stream."""
        return self._chunks.last_events()

    def _first_fields(self, output: RequestOutput) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._style.returns_token_ids:
            fields["prompt_token_ids"] = output.prompt_token_ids
        if self._style.returns_prompt_text:
            fields["prompt_text"] = output.prompt
        return fields

    def _choice(self, part: CompletionOutput) -> bytes:
        """The JSON of what is new in a sequence; nothing when the client would see nothing."""
        returns_ids = self._style.returns_token_ids
        if part.finish_reason is None and part.logprobs is None and not returns_ids:
            # Nearly all chunks; written by hand it takes half of a struct's time.
            if not part.text:
                return b""
            return b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (
                part.index,
                encoder.encode(part.text),
            )
        return encoder.encode(
            _ChunkChoice(
                index=part.index,
                delta=_Delta(part.text),
                logprobs=chat_logprobs(part, self._num_top, self._style),
                finish_reason=part.finish_reason,
                stop_reason=UNSET if part.finish_reason is None else part.stop_reason,
                token_ids=part.token_ids if returns_ids else UNSET,
            )
        )
