"""What the two generating routes share: reading, a place in the queue, running and answering."""

import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.errors import QueueTimeoutError
from jaxserve.outputs import RequestOutput
from jaxserve.processing.request_loop import Submission
from server.access.limits import read_body
from server.protocol.typed_body import ignored_fields_header
from server.state import ServerState, state_of
from server.streaming import (
    EventWriter,
    Header,
    run_until_disconnect,
    scheduled_outputs,
    send_stream,
)

logger = logging.getLogger(__name__)

type OpenStream = Callable[[Submission], AsyncGenerator[RequestOutput]]

LARGE_BODY_BYTES = 1 << 16
"""Larger bodies are decoded in a thread: 1 MiB takes up to 20 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request that is ready to run, and how it is answered.

    Attributes:
      response_id: of the answer.
      submissions: what the engine runs, one a prompt.
      unknown_fields: names of fields of the body that were not known.
      writer: makes the events of a stream; None where one answer comes at the end.
      make_body: makes that answer of the outputs, one a prompt.
      open_stream: gives the outputs of a submission; None is the engine's `stream`.
    """

    response_id: str
    submissions: Sequence[Submission]
    unknown_fields: list[str]
    writer: EventWriter | None
    make_body: Callable[[Sequence[RequestOutput]], bytes]
    open_stream: OpenStream | None = None

    @property
    def has_timeout(self) -> bool:
        """Whether a request of it has a timeout."""
        return any(request.timeout_seconds is not None for request, _ in self.submissions)

    @property
    def headers(self) -> list[Header]:
        """Of the answer, besides the usual ones."""
        if not self.unknown_fields:
            return []
        names = ignored_fields_header(self.unknown_fields)
        return [(b"x-jaxserve-ignored-fields", names.encode())]


class GenerationEndpoint:
    """An ASGI endpoint that makes text.

    Args:
      prepare: makes a job of a body; whatever may fail because of the client fails there.
    """

    def __init__(self, prepare: Callable[[ServerState, Scope, bytes], Awaitable[Job]]):
        self._prepare = prepare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; its work ends when its client goes."""
        state = state_of(scope)
        try:
            body = await read_body(scope, receive, state.config.max_body_bytes)
        except ClientDisconnect:
            return
        await run_until_disconnect(self._answer(state, scope, body, send), receive)

    async def _answer(self, state: ServerState, scope: Scope, body: bytes, send: Send) -> None:
        try:
            with state.queue.place() as place:
                job = await self._prepare(state, scope, body)
                place.take(job.submissions)
                outputs = await _run(state, job, send)
        except QueueTimeoutError as error:
            error.retry_seconds = state.queue.seconds_until_served()
            raise
        if outputs is None:
            return
        content = job.make_body(outputs)
        response = Response(content, media_type="application/json")
        response.raw_headers.extend(job.headers)
        await send({"type": "http.response.start", "status": 200, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": content})


async def _run(state: ServerState, job: Job, send: Send) -> list[RequestOutput] | None:
    """Run a job; None: it was a stream, and its client has it."""
    if state.config.enable_log_requests:
        log_job(job, state.config.max_log_len)
    open_stream = job.open_stream or state.engine.stream
    streams = [open_stream(submission) for submission in job.submissions]
    if job.writer is not None:
        has_queue_limit = state.engine.config.max_queue_time is not None
        await send_stream(
            send,
            streams,
            job.writer,
            headers=job.headers,
            keep_alive_seconds=state.config.sse_keep_alive_interval,
            # What waits in vain is answered 503, for which the answer must not have begun.
            starts_at_once=not (job.has_timeout or has_queue_limit),
        )
        return None
    outputs: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(scheduled_outputs(streams)) as given:
        async for prompt_index, output in given:
            outputs[prompt_index] = output
    return [outputs[index] for index in sorted(outputs)]


async def decode_body[T](state: ServerState, body: bytes, decode: Callable[..., T]) -> T:
    """Decode a body, a large one in a thread; raises what `decode` raises."""
    config = state.config

    def work() -> T:
        return decode(body, max_depth=config.max_json_depth, strict=config.strict)

    if len(body) <= LARGE_BODY_BYTES:
        return work()
    return await state.engine.in_text_thread(work)


def log_job(job: Job, max_characters: int) -> None:
    """Log what a request asks; a prompt is cut between characters, never inside one."""
    for request, text in job.submissions:
        shown = request.prompt_token_ids[:max_characters] if text is None else text[:max_characters]
        logger.info(
            "request %s: prompt %r, %d tokens, %s",
            job.response_id,
            shown,
            len(request.prompt_token_ids),
            request.sampling_params,
        )
