"""Lines of OpenAI's batch files: what each asks, and the line that answers it."""

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from jaxserve.errors import (
    InvalidRequestError,
    JaxServeError,
    ModelNotFoundError,
    QueueTimeoutError,
    RowError,
    describe_value,
)
from jaxserve.llm import LLM
from jaxserve.outputs import RequestOutput
from jaxserve.processing.request_loop import Submission
from jaxserve.processing.request_preparer import check_pool_length
from jaxserve.sampling_params import RequestOutputKind
from server.errors import error_body, error_kind
from server.protocol.answers import AnswerStyle, check_scheduled, now_seconds
from server.protocol.chat import (
    ChatRequest,
    chat_options,
    chat_sampling_params,
    decode_chat_request,
)
from server.protocol.chat_answers import chat_response
from server.protocol.completion import (
    CompletionRequest,
    completion_sampling_params,
    decode_completion_request,
    engine_prompts,
)
from server.protocol.completion_answers import completion_response
from server.protocol.json_body import decode_object
from server.protocol.sampling import make_request_options

MAX_LINE_BYTES = 8 << 20
MAX_CUSTOM_ID = 512
URLS = ("/v1/chat/completions", "/v1/completions")

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One line of the input that was understood.

    Attributes:
      custom_id: of the client.
      request: its body.
      submissions: what the engine is asked because of it.
    """

    custom_id: str
    request: ChatRequest | CompletionRequest
    submissions: list[Submission]


def read_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines that hold something, one at a time; of a line that is too long only the start."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        rest = line
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 1)
        if line.strip():
            yield line


class BatchReader:
    """Makes engine requests of lines.

    Args:
      llm: runs them.
      model_names: under which a line may name the model.
    """

    def __init__(self, llm: LLM, model_names: Sequence[str]):
        self._llm, self._model_names = llm, model_names
        self._defaults = llm.get_default_sampling_params()
        self._max_tokens = llm.engine.scheduler.max_tokens_per_sequence

    def read(self, line: bytes) -> BatchLine | bytes:
        """What a line asks; or the output line that says why it asks nothing."""
        custom_id: str | None = None
        try:
            if len(line) > MAX_LINE_BYTES:
                raise InvalidRequestError(f"a line must have at most {MAX_LINE_BYTES} bytes")
            fields = decode_object(line)
            custom_id = _custom_id(fields)
            request = self._request(fields)
            return BatchLine(custom_id, request, self._submissions(request))
        except JaxServeError as error:
            return failed_line(custom_id, error)

    def answer(self, line: BatchLine, outputs: Sequence[RequestOutput]) -> bytes:
        """The output line of finished requests."""
        request_id = uuid.uuid4().hex
        is_chat = isinstance(line.request, ChatRequest)
        style = AnswerStyle(
            response_id=f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}",
            model=self._model_names[0],
            created=now_seconds(),
            shows_ids_as_tokens=bool(line.request.return_tokens_as_token_ids),
            returns_token_ids=bool(line.request.return_token_ids),
        )
        try:
            body = self._body(line.request, outputs, style)
        except (QueueTimeoutError, RowError) as error:
            return failed_line(line.custom_id, error)
        return _output_line(line.custom_id, request_id, 200, body, None)

    def _request(self, fields: dict[str, Any]) -> ChatRequest | CompletionRequest:
        """The checked body of a line."""
        if fields.get("method") != "POST":
            raise InvalidRequestError.for_field("method", "must be POST", fields.get("method"))
        url, body = fields.get("url"), fields.get("body")
        if url not in URLS:
            raise InvalidRequestError.for_field("url", f"must be one of {', '.join(URLS)}", url)
        if not isinstance(body, dict):
            raise InvalidRequestError.for_field("body", "must be a JSON object", body)
        decode = decode_chat_request if url == URLS[0] else decode_completion_request
        request, _ = decode(body)
        if request.model is not None and request.model not in self._model_names:
            names = ", ".join(f"`{name}`" for name in self._model_names)
            shown = describe_value(request.model)[1:-1]
            raise ModelNotFoundError(f"The model `{shown}` does not exist. Valid aliases: {names}")
        if request.stream:
            raise InvalidRequestError("stream must not be set in a batch", parameter="stream")
        if request.use_beam_search:
            rule = "must not be set in a batch"
            raise InvalidRequestError(f"use_beam_search {rule}", parameter="use_beam_search")
        return request

    def _submissions(self, request: ChatRequest | CompletionRequest) -> list[Submission]:
        maker, kind = self._llm.request_maker, RequestOutputKind.FINAL_ONLY
        asked: dict[str, Any] = {
            "request_options": make_request_options(request),
            "priority": request.priority,
        }
        if isinstance(request, ChatRequest):
            params = chat_sampling_params(request, self._defaults)
            made = maker.of_chats(request.messages, params, kind, **asked, **chat_options(request))
        else:
            params = completion_sampling_params(request, self._defaults)
            prompts = engine_prompts(request, self._llm.get_tokenizer())
            made = maker.of_prompts(prompts, params, kind, **asked)
        for submission, _ in made:
            check_pool_length(submission, self._max_tokens)
        return made

    def _body(
        self,
        request: ChatRequest | CompletionRequest,
        outputs: Sequence[RequestOutput],
        style: AnswerStyle,
    ) -> msgspec.Struct:
        check_scheduled(outputs)
        if isinstance(request, ChatRequest):
            return chat_response(request, outputs[0], style)
        texts = [self._prompt_text(output) for output in outputs] if request.echo else None
        return completion_response(request, outputs, style, prompt_texts=texts)

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self._llm.get_tokenizer().decode(output.prompt_token_ids or ())


def failed_line(custom_id: str | None, error: Exception) -> bytes:
    """The output line of a request that failed; `error` holds what the body holds."""
    body = error_body(error)
    request_id = uuid.uuid4().hex
    return _output_line(custom_id, request_id, error_kind(error).status, body, body["error"])


def _output_line(
    custom_id: str | None, request_id: str, status: int, body: Any, error: Any
) -> bytes:
    response = {"status_code": status, "request_id": request_id, "body": body}
    line = {
        "id": f"batch_req_{request_id}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return _encoder.encode(line) + b"\n"


def _custom_id(fields: dict[str, Any]) -> str:
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or len(custom_id) > MAX_CUSTOM_ID:
        rule = f"must be a text of at most {MAX_CUSTOM_ID} characters"
        raise InvalidRequestError.for_field("custom_id", rule, custom_id)
    return custom_id
