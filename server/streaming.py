"""Answers on the wire: server-sent events, and the end of work whose client has gone."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from typing import Any, Protocol

from starlette.types import Receive, Send

from jaxserve.errors import JaxServeError
from jaxserve.outputs import RequestOutput
from server.errors import error_events
from server.protocol.answers import check_scheduled, waited_in_vain

logger = logging.getLogger(__name__)

STALLED_WRITE_SECONDS = 60.0
"""A client that takes nothing for so long has gone."""
_KEEP_ALIVE = b": keep-alive\n\n"

type Header = tuple[bytes, bytes]


class EventWriter(Protocol):
    """Makes the events of one stream."""

    def events(self, prompt_index: int, output: RequestOutput) -> bytes:
        """The events of what is new; may be empty."""
        ...

    def last_events(self) -> bytes:
        """The end of the stream."""
        ...


async def run_until_disconnect(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Do the work of a request whose body was read; it is cancelled when its client goes.

    Raises:
      Exception: what the work raises.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_done = working.done()
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    if is_done:
        working.result()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def merge_streams(
    streams: Sequence[AsyncGenerator[RequestOutput]],
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """The outputs of several requests as they come, each with its request's position.

    Leaving early ends all of them.
    """
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as stream:
            async for output in stream:
                yield 0, output
        return
    # A place for each: what comes faster than it is taken waits, joined, in the engine's inbox.
    queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None]
    queue = asyncio.Queue(maxsize=len(streams))
    tasks = [asyncio.create_task(_pump(i, stream, queue)) for i, stream in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int, stream: AsyncGenerator[RequestOutput], queue: asyncio.Queue[Any]
) -> None:
    async with contextlib.aclosing(stream):
        try:
            async for output in stream:
                await queue.put((index, output))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)


async def scheduled_outputs(
    streams: Sequence[AsyncGenerator[RequestOutput]],
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """What `merge_streams` gives, held back until an output shows that a request ran.

    Raises:
      QueueTimeoutError: none did: all waited until their timeouts, and nothing was given.
    """
    held: list[tuple[int, RequestOutput]] = []
    async with contextlib.aclosing(merge_streams(streams)) as outputs:
        async for item in outputs:
            held.append(item)
            if not waited_in_vain(item[1]):
                break
        check_scheduled([output for _, output in held])
        for item in held:
            yield item
        async for item in outputs:
            yield item


async def send_stream(
    send: Send,
    streams: Sequence[AsyncGenerator[RequestOutput]],
    writer: EventWriter,
    *,
    headers: Sequence[Header] = (),
    keep_alive_seconds: float = 0.0,
    starts_at_once: bool = True,
) -> None:
    """Answer with the events of requests; an error ends the stream as an event.

    Args:
      send: of ASGI.
      streams: outputs of the requests.
      writer: makes events of them.
      headers: besides those of every event stream.
      keep_alive_seconds: silence after which a comment is sent; 0 = never.
      starts_at_once: begin the answer now, not with the first event or comment. Until it has begun
        an error can be answered with its status.

    Raises:
      Exception: an error came before the answer had begun.
    """
    sender = _EventSender(send, headers)
    if starts_at_once:
        await sender.start()
    with _leave_when_stalled(sender), _keep_alive(sender, keep_alive_seconds):
        try:
            async with contextlib.aclosing(scheduled_outputs(streams)) as outputs:
                async for prompt_index, output in outputs:
                    if events := writer.events(prompt_index, output):
                        await sender.send(events)
            last = writer.last_events()
        except Exception as error:
            if not sender.has_started:
                raise
            if not isinstance(error, JaxServeError):
                logger.exception("a stream failed")
            last = error_events(error)
        await sender.send(last, is_last=True)


class _EventSender:
    """Sends events.

    Attributes:
      has_started: whether status and headers were sent; the first event sends them at the latest.
      num_begun, num_done: sends; they differ while one waits for its client to read.
    """

    def __init__(self, send: Send, headers: Sequence[Header]):
        self._send, self._headers = send, headers
        self.has_started = False
        self.num_begun = self.num_done = 0

    async def start(self) -> None:
        self.has_started = True
        first = [(b"content-type", b"text/event-stream; charset=utf-8")]
        first += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"), *self._headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": first})

    async def send(self, events: bytes, *, is_last: bool = False) -> None:
        self.num_begun += 1
        if not self.has_started:
            await self.start()
        await self._send({"type": "http.response.body", "body": events, "more_body": not is_last})
        self.num_done += 1


@contextlib.contextmanager
def _leave_when_stalled(sender: _EventSender) -> Iterator[None]:
    """End the work when one send waits for STALLED_WRITE_SECONDS, or up to twice as long.

    A timer a stream, since a timeout around each send would cost more than making the event.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    waiting, is_stalled = -1, False

    def check() -> None:
        nonlocal waiting, is_stalled, timer
        if sender.num_begun > sender.num_done and sender.num_begun == waiting:
            is_stalled = True
            task.cancel()
            return
        waiting = sender.num_begun if sender.num_begun > sender.num_done else -1
        timer = loop.call_later(STALLED_WRITE_SECONDS, check)

    timer = loop.call_later(STALLED_WRITE_SECONDS, check)
    try:
        yield
    except asyncio.CancelledError:
        if not is_stalled or task.uncancel():
            raise
        logger.warning("a client took nothing for %.0f s and was left", STALLED_WRITE_SECONDS)
    finally:
        timer.cancel()


@contextlib.contextmanager
def _keep_alive(sender: _EventSender, seconds: float) -> Iterator[None]:
    """Send a comment after each silence, so that no proxy takes the connection for dead."""
    if not seconds:
        yield
        return
    task = asyncio.create_task(_send_comments(sender, seconds))
    try:
        yield
    finally:
        task.cancel()


async def _send_comments(sender: _EventSender, seconds: float) -> None:
    # A comment that waited for its client while the stream ended comes too late: uvicorn raises.
    with contextlib.suppress(RuntimeError):
        while True:
            num_begun = sender.num_begun
            await asyncio.sleep(seconds)
            if sender.num_begun == num_begun == sender.num_done:
                await sender.send(_KEEP_ALIVE)
