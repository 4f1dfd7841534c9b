"""OpenRequests: the requests whose clients wait, and the outputs that no one has taken yet."""

import asyncio
import itertools

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.outputs import RequestOutput
from jaxserve.processing.output_processor import OutputProcessor, ProcessedStep
from jaxserve.processing.request_loop import Submission
from jaxserve.request import Request
from jaxserve.sampling_params import RequestOutputKind
from jaxserve.step import SequenceUpdate


class Inbox:
    """The outputs of one request that its client has not taken yet, joined into one.

    Attributes:
      request: of the client.
      sent: the same as the engine knows it.
    """

    def __init__(self, request: Request, sent: Request):
        self.request, self.sent = request, sent
        self._is_delta = request.sampling_params.output_kind is RequestOutputKind.DELTA
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._has_news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Add an output, which stays as it is."""
        if self._output is None:
            self._output = output
        else:
            self._output.add(output, aggregate=self._is_delta)
        self._has_news.set()

    def fail(self, error: Exception) -> None:
        """Raise an error where outputs are taken; outputs before it are still given."""
        self._error = error
        self._has_news.set()

    async def take(self) -> RequestOutput:
        """All outputs since the last call; waits for one."""
        await self._has_news.wait()
        output, self._output = self._output, None
        if output is None:
            assert self._error is not None
            raise self._error.with_traceback(None)  # others raise the same one
        if self._error is None:
            self._has_news.clear()
        return output


class OpenRequests:
    """Brings each client the outputs of its request; used on one event loop only.

    The engine knows a request by a name that is never used again. A client may leave and take the
    same id once more while news of the first request is still under way.
    """

    def __init__(self, processor: OutputProcessor):
        self._processor = processor
        self._inboxes: dict[str, Inbox] = {}
        self._engine_id_of: dict[str, str] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Requests whose clients wait, for the engine or to take what it has brought."""
        return len(self._inboxes)

    @property
    def num_working(self) -> int:
        """Requests for which the engine still has something to bring."""
        return self._processor.num_unfinished_requests

    def open(self, submission: Submission) -> Inbox:
        """Expect the outputs of a request; call it before the engine has it.

        Raises:
          InvalidRequestError: the id is in use, or stop strings are given without a tokenizer.
        """
        request, text = submission
        name = request.request_id
        if name in self._engine_id_of:
            rule = "must differ from those of unfinished requests"
            raise InvalidRequestError.for_field("request_id", rule, name)
        sent = msgspec.structs.replace(request, request_id=f"{name}#{next(self._numbers)}")
        self._processor.add(sent, text)
        self._engine_id_of[name] = sent.request_id
        self._inboxes[sent.request_id] = Inbox(request, sent)
        return self._inboxes[sent.request_id]

    def close(self, inbox: Inbox) -> bool:
        """Forget a request whose client has left.

        Returns:
          Whether the engine still works on it.
        """
        del self._inboxes[inbox.sent.request_id]
        del self._engine_id_of[inbox.request.request_id]
        return self._processor.drop(inbox.sent.request_id)

    def engine_id(self, request_id: str) -> str | None:
        """The engine's name of a client's request; None if no one waits for that."""
        return self._engine_id_of.get(request_id)

    def process(self, updates: list[SequenceUpdate]) -> ProcessedStep:
        """Make outputs of one step's updates; each goes to `deliver` next."""
        return self._processor.process(updates)

    def deliver(self, output: RequestOutput) -> Request:
        """Give an output, named as its client knows it, to that client.

        Returns:
          The request, as its client made it.
        """
        inbox = self._inboxes[output.request_id]
        output.request_id = inbox.request.request_id
        inbox.put(output)
        return inbox.request

    def refuse(self, engine_id: str, error: Exception) -> None:
        """Tell a client that the engine has not taken its request."""
        self._processor.drop(engine_id)
        inbox = self._inboxes.get(engine_id)
        if inbox is not None:
            inbox.fail(error)

    def fail_all(self, error: Exception) -> None:
        """Tell all who wait that there will be nothing more."""
        for inbox in self._inboxes.values():
            inbox.fail(error)
