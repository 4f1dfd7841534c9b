"""Tests of jaxserve/processing/request_loop.py with an engine that only notes its calls."""

from collections.abc import Callable, Iterator

import pytest

from jaxserve.errors import RequestTooLongError
from jaxserve.outputs import RequestOutput
from jaxserve.processing.output_processor import OutputProcessor
from jaxserve.processing.request_loop import RequestLoop
from jaxserve.request import FinishReason, Request
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.step import SequenceUpdate, StopAbort


class NotingClient:
    """An EngineClient whose steps give each request a token; `in_step` runs inside each step."""

    def __init__(self):
        self.calls: list[str] = []
        self.running: list[str] = []
        self.in_step: Callable[[], None] = lambda: None

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running)

    def add(self, request: Request) -> None:
        if request.request_id == "too long":
            raise RequestTooLongError("too long")
        self.calls.append(f"add {request.request_id}")
        self.running.append(request.request_id)

    def abort(self, request_id: str) -> None:
        self.calls.append(f"abort {request_id}")
        if request_id in self.running:
            self.running.remove(request_id)

    def stop(self, stop: StopAbort) -> None:
        self.abort(stop.request_id)

    def updates(self) -> list[SequenceUpdate]:
        self.calls.append("begin")
        self.in_step()
        self.calls.append("end")
        return [SequenceUpdate(request_id=i, index=0, new_token_ids=(7,)) for i in self.running]


def submission(request_id: str, kind: RequestOutputKind) -> tuple[Request, None]:
    params = SamplingParams(output_kind=kind)
    request = Request(request_id=request_id, prompt_token_ids=(1,), sampling_params=params)
    return request, None


@pytest.fixture
def client() -> NotingClient:
    return NotingClient()


@pytest.fixture
def loop(client: NotingClient) -> RequestLoop:
    return RequestLoop(client, OutputProcessor(None))


def start(loop: RequestLoop, request_id: str) -> Iterator[RequestOutput]:
    stream = loop.stream(submission(request_id, RequestOutputKind.DELTA))
    assert next(stream).outputs[0].token_ids == [7]
    return stream


def test_a_stream_left_early_is_aborted_at_once(loop: RequestLoop, client: NotingClient):
    start(loop, "a").close()  # pyright: ignore[reportAttributeAccessIssue]
    assert client.calls == ["add a", "begin", "end", "abort a"]


def test_a_stream_that_is_closed_inside_a_step_ends_after_it(
    loop: RequestLoop, client: NotingClient
):
    """As the garbage collector may do: the scheduler must not change while it is used."""
    closing, reading = start(loop, "a"), start(loop, "b")
    client.calls.clear()
    client.in_step = closing.close  # pyright: ignore[reportAttributeAccessIssue]
    assert next(reading).outputs[0].token_ids == [7]
    assert client.calls == ["begin", "end", "abort a"]
    assert client.running == ["b"]


def test_a_request_that_is_refused_takes_the_others_of_its_call_with_it(
    loop: RequestLoop, client: NotingClient
):
    ids = ("a", "too long", "b")
    submissions = [submission(i, RequestOutputKind.FINAL_ONLY) for i in ids]
    with pytest.raises(RequestTooLongError):
        loop.run(submissions, lambda num_new: None)
    assert client.running == []
    assert client.calls == ["add a", "abort a", "abort too long"]


def test_close_ends_everything(loop: RequestLoop, client: NotingClient):
    streams = [start(loop, "a"), start(loop, "b")]
    loop.close()
    assert client.running == []
    assert len(streams) == 2


def test_the_text_sides_time_is_counted(loop: RequestLoop, client: NotingClient):
    assert loop.output_seconds == 0
    start(loop, "a")
    assert 0 < loop.output_seconds < 10


def test_outputs_come_back_in_order_whichever_ends_first(loop: RequestLoop, monkeypatch):
    ends = iter(["b", "c", "a"])

    def updates() -> list[SequenceUpdate]:
        end = FinishReason.LENGTH
        return [SequenceUpdate(request_id=next(ends), index=0, finish_reason=end)]

    monkeypatch.setattr(loop._client, "updates", updates)
    monkeypatch.setattr(loop._client, "add", lambda request: None)
    shown: list[int] = []
    submissions = [submission(i, RequestOutputKind.FINAL_ONLY) for i in "abc"]
    outputs = loop.run(submissions, shown.append)
    assert [output.request_id for output in outputs] == ["a", "b", "c"]
    assert shown == [1, 1, 1]
