"""RequestLoop: drives an engine in the caller's thread until the caller's requests are finished."""

import atexit
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from jaxserve.engine_client import EngineClient
from jaxserve.errors import EngineDeadError
from jaxserve.outputs import RequestOutput
from jaxserve.processing.output_processor import ProcessedStep
from jaxserve.request import FinishReason, Request
from jaxserve.step import SequenceUpdate

type Submission = tuple[Request, str | None]
"""A request, and the text of its prompt if there was one."""


class Processor(Protocol):
    """What a loop needs of an OutputProcessor; its methods tell more."""

    def add(self, request: Request, prompt_text: str | None = None) -> None:
        """Expect a request's updates."""
        ...

    def drop(self, request_id: str) -> bool:
        """Forget a request; returns whether it was unfinished."""
        ...

    def process(self, updates: list[SequenceUpdate]) -> ProcessedStep:
        """Make outputs of one step's updates."""
        ...


class RequestLoop:
    """Hands each caller the outputs of its requests, whoever runs the step that brings them.

    Not safe to use from two threads at once. Ctrl-C takes effect between two steps, so that the
    engine stays usable.

    Args:
      client: of the engine.
      processor: makes outputs of its updates.
      part_tokens: many requests are handed over in parts of more prompt tokens than this, with a
        step after each, so that the device does not wait for the last one; None = all at once.

    Attributes:
      output_seconds: host time spent on making outputs of tokens.
    """

    def __init__(
        self, client: EngineClient, processor: Processor, *, part_tokens: int | None = None
    ):
        self._client, self._processor, self._part_tokens = client, processor, part_tokens
        self._inbox_of: dict[str, list[RequestOutput]] = {}
        self._left: list[str] = []
        self._is_advancing = False
        self.output_seconds = 0.0
        atexit.register(_close_at_exit, weakref.ref(self))

    def run(
        self, submissions: Sequence[Submission], show: Callable[[int], None]
    ) -> list[RequestOutput]:
        """Run requests of `FINAL_ONLY` outputs to their ends.

        Args:
          submissions: the requests.
          show: called after each step with the number of requests that it finished.

        Returns:
          The output of each request, in order.

        Raises:
          RequestTooLongError: one can never fit the engine. Those before it may have begun, unless
            the caller has seen that all fit.
          EngineDeadError: the engine was dead already; where it dies on the way, outputs tell so.
        """
        ids = [request.request_id for request, _ in submissions]
        inbox: list[RequestOutput] = []
        parts, num_submitted = _cut(submissions, self._part_tokens), 0
        try:
            while (num_finished := len(inbox)) < len(ids):
                if part := next(parts, None):
                    self._submit(part, inbox, is_begun=num_submitted > 0)
                    num_submitted += len(part)
                if len(inbox) < num_submitted:
                    self._advance()
                show(len(inbox) - num_finished)
        finally:
            self._leave(ids)
        output_of = {output.request_id: output for output in inbox}
        return [output_of[request_id] for request_id in ids]

    def stream(self, submission: Submission) -> Iterator[RequestOutput]:
        """Give the outputs of one request as they come; leaving early ends it."""
        inbox: list[RequestOutput] = []
        try:
            self._submit([submission], inbox)
            while True:
                for output in inbox:
                    yield output
                    if output.finished:
                        return
                inbox.clear()
                self._advance()
        finally:
            self._leave([submission[0].request_id])

    def drain(self) -> None:
        """Step until nothing is unfinished; streams find their outputs when they go on."""
        while self._client.has_unfinished:
            self._advance()

    def close(self) -> None:
        """End all requests, and wait for the steps in flight."""
        self._leave(list(self._inbox_of))

    def _submit(
        self,
        submissions: Sequence[Submission],
        inbox: list[RequestOutput],
        *,
        is_begun: bool = False,
    ) -> None:
        """Hand requests over; what a dead engine does not take ends as all that it had, if any."""
        with _DeferredInterrupt():
            for request, text in submissions:
                self._inbox_of[request.request_id] = inbox
                self._processor.add(request, text)
                try:
                    self._client.add(request)
                except EngineDeadError as error:
                    if not is_begun:
                        raise
                    self._deliver(_failures(request, str(error)))

    def _advance(self) -> None:
        """One step; its outputs go to whoever waits for them."""
        with _DeferredInterrupt():
            self._is_advancing = True
            try:
                self._deliver(self._client.updates())
            finally:
                self._is_advancing = False
            if self._left:
                self._leave([])

    def _deliver(self, updates: list[SequenceUpdate]) -> None:
        """Make outputs, and put them where their callers look."""
        start = time.perf_counter()
        step = self._processor.process(updates)
        self.output_seconds += time.perf_counter() - start
        for stop in step.aborts:
            self._client.stop(stop)
        for output in step.outputs:
            self._inbox_of[output.request_id].append(output)

    def _leave(self, request_ids: Sequence[str]) -> None:
        """End what is unfinished, and wait for steps in flight when nobody else needs any.

        A stream that the garbage collector closes inside a step waits for the step's end.
        """
        self._left += request_ids
        if self._is_advancing:
            return
        with _DeferredInterrupt():
            left, self._left = self._left, []
            for request_id in left:
                self._inbox_of.pop(request_id, None)
                if self._processor.drop(request_id):
                    self._client.abort(request_id)
            while not self._inbox_of and self._client.has_unfinished:
                self._client.updates()


def _cut(
    submissions: Sequence[Submission], part_tokens: int | None
) -> Iterator[Sequence[Submission]]:
    """Cut requests, in their order, into parts of more prompt tokens; the last may have fewer."""
    begin = num_tokens = 0
    for end, (request, _) in enumerate(submissions, 1):
        num_tokens += len(request.prompt_token_ids)
        if end == len(submissions) or (part_tokens is not None and num_tokens > part_tokens):
            yield submissions[begin:end]
            begin, num_tokens = end, 0


def _failures(request: Request, error: str) -> list[SequenceUpdate]:
    """The updates that end all sequences of a request with an error."""
    return [
        SequenceUpdate(
            request_id=request.request_id,
            index=index,
            finish_reason=FinishReason.ERROR,
            error=error,
        )
        for index in range(request.sampling_params.n)
    ]


class _DeferredInterrupt:
    """Holds a Ctrl-C back for a moment: half a step would leave the engine unusable.

    A second one is not held back. Handlers of the user's own are left alone, and only the main
    thread hears of Ctrl-C at all.
    """

    def __enter__(self) -> None:
        self._is_held = self._is_installed = False
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._hold)
            self._is_installed = True

    def _hold(self, *_: Any) -> None:
        if self._is_held:
            raise KeyboardInterrupt
        self._is_held = True

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._is_held and error_type is None:
            raise KeyboardInterrupt


def _close_at_exit(reference: "weakref.ref[RequestLoop]") -> None:
    """Wait for steps in flight: a process that ends while XLA's threads run is aborted."""
    loop = reference()
    if loop is not None:
        loop.close()
