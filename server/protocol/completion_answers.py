"""Answers of /v1/completions: the whole one, and the events of a stream."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from jaxserve.outputs import CompletionOutput, RequestOutput
from server.protocol.answers import (
    AnswerStyle,
    CompletionLogprobs,
    Usage,
    check_output,
    completion_logprobs,
    encoder,
    usage_of,
)
from server.protocol.chunks import ChunkWriter
from server.protocol.completion import CompletionRequest


class CompletionChoice(msgspec.Struct):
    """One of the continuations, or what is new of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | None | UnsetType = UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """The body of an answer."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str | None = None


def completion_response(
    request: CompletionRequest,
    outputs: Sequence[RequestOutput],
    style: AnswerStyle,
    *,
    prompt_texts: Sequence[str] | None = None,
) -> CompletionResponse:
    """The answer of a finished completion.

    Args:
      request: of the client.
      outputs: of the engine, one a prompt.
      style: of the answer.
      prompt_texts: what `echo` repeats, one a prompt; None without echo.

    Raises:
      RowError: a sequence has failed.
    """
    choices: list[CompletionChoice] = []
    for number, output in enumerate(outputs):
        for part in output.outputs:
            check_output(part)
            echoed = prompt_texts[number] if prompt_texts is not None else ""
            logprobs = completion_logprobs(part, request.logprobs or 0, len(echoed), style)
            choices.append(
                CompletionChoice(
                    index=number * request.num_sequences + part.index,
                    text=echoed + part.text,
                    logprobs=logprobs,
                    finish_reason=part.finish_reason,
                    stop_reason=part.stop_reason,
                    token_ids=part.token_ids if style.returns_token_ids else UNSET,
                    prompt_token_ids=output.prompt_token_ids if style.returns_token_ids else UNSET,
                )
            )
    return CompletionResponse(
        id=style.response_id,
        created=style.created,
        model=style.model,
        choices=choices,
        usage=usage_of(outputs, style),
        system_fingerprint=style.system_fingerprint,
    )


class CompletionStream:
    """Makes the events of one streamed completion.

    Args:
      request: of the client.
      style: of the answer.
      prompt_texts: what `echo` repeats, one a prompt; None without echo.
      forces_usage: end with the usage even when the client has not asked.
    """

    def __init__(
        self,
        request: CompletionRequest,
        style: AnswerStyle,
        *,
        prompt_texts: Sequence[str] | None = None,
        forces_usage: bool = False,
    ):
        self._chunks = ChunkWriter(
            "text_completion", style, request.stream_options, forces_usage=forces_usage
        )
        self._request, self._style, self._prompt_texts = request, style, prompt_texts
        self._num_sent_chars: dict[int, int] = {}

    def events(self, prompt_index: int, output: RequestOutput) -> bytes:
        """The events of what is new.

        Raises:
          RowError: a sequence has failed.
        """
        self._chunks.count(prompt_index, output)
        events: list[bytes] = []
        for part in output.outputs:
            check_output(part)
            index = prompt_index * self._request.num_sequences + part.index
            is_first = index not in self._num_sent_chars
            echoed = ""
            if is_first:
                self._num_sent_chars[index] = 0
                echoed = self._prompt_texts[prompt_index] if self._prompt_texts is not None else ""
            ids = output.prompt_token_ids if is_first else None
            if choice := self._choice(index, part, echoed, ids):
                events.append(self._chunks.chunk(choice))
        return b"".join(events)

    def last_events(self) -> bytes:
        """The end of the stream."""
        return self._chunks.last_events()

    def _choice(
        self, index: int, part: CompletionOutput, echoed: str, prompt_ids: list[int] | None
    ) -> bytes:
        """The JSON of what is new in a sequence; nothing when the client would see nothing."""
        text, returns_ids = echoed + part.text, self._style.returns_token_ids
        offset = self._num_sent_chars[index] + len(echoed)
        self._num_sent_chars[index] += len(text)
        if part.finish_reason is None and part.logprobs is None and not returns_ids:
            # Nearly all chunks; written by hand it takes half of a struct's time.
            if not text:
                return b""
            return b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}' % (
                index,
                encoder.encode(text),
            )
        return encoder.encode(
            CompletionChoice(
                index=index,
                text=text,
                logprobs=completion_logprobs(
                    part, self._request.logprobs or 0, offset, self._style
                ),
                finish_reason=part.finish_reason,
                stop_reason=UNSET if part.finish_reason is None else part.stop_reason,
                token_ids=part.token_ids if returns_ids else UNSET,
                prompt_token_ids=prompt_ids if returns_ids and prompt_ids is not None else UNSET,
            )
        )
