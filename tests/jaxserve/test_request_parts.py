"""Requests that are handed over in parts: the steps are those of all requests at once."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import EngineDeadError, RequestTooLongError
from jaxserve.processing.output_processor import OutputProcessor
from jaxserve.processing.request_loop import RequestLoop, Submission
from jaxserve.request import Request, Sequence
from jaxserve.sampling_params import RequestOutputKind
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.step import ScheduledRow, SequenceUpdate, StopAbort
from tests.jaxserve.scheduler_builders import make_scheduler, make_sequence
from tests.jaxserve.simulated_engine import SimulatedEngine

BUDGET = 32


class SimulatedClient:
    """An EngineClient of a simulated engine.

    Attributes:
      steps: for each step its rows, as (request id, index, first token, tokens).
      calls: ids of added and aborted requests, and "step".
      on_add: runs before a request is taken.
    """

    def __init__(self, scheduler: Scheduler):
        self.engine = SimulatedEngine(scheduler)
        self.steps: list[list[tuple[str, int, int, int]]] = []
        self.calls: list[str] = []
        self.on_add: Callable[[Request], None] = lambda request: None
        self._schedule = scheduler.schedule
        scheduler.schedule = self._noting_schedule

    def _noting_schedule(self) -> Any:
        output = self._schedule()
        if output is not None:
            self.steps.append([_facts(row) for row in output.rows])
        return output

    @property
    def has_unfinished(self) -> bool:
        return self.engine.scheduler.has_unfinished

    def add(self, request: Request) -> None:
        self.on_add(request)
        self.calls.append(f"add {request.request_id}")
        seed = int(request.request_id) * 100
        for index in range(request.sampling_params.n):
            ids = list(request.prompt_token_ids)
            sequence = Sequence(request=request, index=index, seed=seed + index, token_ids=ids)
            self.engine.add(sequence)

    def abort(self, request_id: str) -> None:
        self.calls.append(f"abort {request_id}")
        self.engine.abort(request_id)

    def stop(self, stop: StopAbort) -> None:
        raise AssertionError("no request has stop strings")

    def updates(self) -> list[SequenceUpdate]:
        self.calls.append("step")
        return self.engine.step()


def _facts(row: ScheduledRow) -> tuple[str, int, int, int]:
    name, index = row.sequence.request.request_id, row.sequence.index
    return name, index, row.start, row.num_scheduled_tokens


def make_submissions(*shapes: tuple[int, int, int]) -> list[Submission]:
    """Requests of (prompt tokens, max_tokens, n), which are named by their places."""
    return [
        (make_sequence(str(i), *lens, n=n, output_kind=RequestOutputKind.FINAL_ONLY).request, None)
        for i, (*lens, n) in enumerate(shapes)
    ]


def make_loop(part_tokens: int | None, **limits: Any) -> tuple[RequestLoop, SimulatedClient]:
    limits = {"max_num_batched_tokens": BUDGET, "token_buckets": (8, 16, BUDGET)} | limits
    client = SimulatedClient(make_scheduler(**limits))
    return RequestLoop(client, OutputProcessor(None), part_tokens=part_tokens), client


def ignore(num_finished: int) -> None:
    pass


SHAPES = st.tuples(st.integers(1, 60), st.integers(1, 12), st.sampled_from([1, 1, 1, 2]))


@settings(deadline=None, max_examples=120)
@given(
    shapes=st.lists(SHAPES, max_size=24),
    max_steps_in_flight=st.integers(1, 3),
    max_decode_row_tokens=st.sampled_from([1, 4]),
    max_num_seqs=st.sampled_from([4, 32]),
    num_pages=st.sampled_from([25, 101]),
)
def test_steps_and_outputs_are_those_of_all_requests_at_once(
    shapes, max_steps_in_flight, max_decode_row_tokens, max_num_seqs, num_pages
):
    runs = []
    for part_tokens in (None, max_steps_in_flight * BUDGET):
        loop, client = make_loop(
            part_tokens,
            num_pages=num_pages,
            max_num_seqs=max_num_seqs,
            max_steps_in_flight=max_steps_in_flight,
            max_decode_row_tokens=max_decode_row_tokens,
        )
        shown: list[int] = []
        outputs = loop.run(make_submissions(*shapes), shown.append)
        client.engine.drain()
        tokens = [[part.token_ids for part in output.outputs] for output in outputs]
        runs.append((client.steps, tokens, [output.request_id for output in outputs], shown))
    assert runs[0] == runs[1]
    assert runs[0][2] == list(map(str, range(len(shapes))))


def test_a_step_follows_each_part_of_more_tokens_than_asked():
    loop, client = make_loop(20)
    loop.run(make_submissions((10, 1, 1), (10, 1, 1), (1, 1, 1), (30, 1, 1), (5, 1, 1)), ignore)
    adds = ["add 0", "add 1", "add 2", "step", "add 3", "step", "add 4", "step"]
    assert client.calls[: len(adds)] == adds


def test_an_interrupt_between_two_parts_leaves_nothing_behind():
    loop, client = make_loop(1)

    def interrupt(num_finished: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop.run(make_submissions(*[(4, 9, 1)] * 3), interrupt)
    assert client.calls[:3] == ["add 0", "step", "abort 0"]
    assert {*client.calls[3:]} <= {"step"}  # which waits for those in flight
    assert not client.has_unfinished
    assert len(loop.run(make_submissions((4, 9, 1)), ignore)) == 1


def test_a_refusal_in_a_later_part_ends_the_earlier_ones():
    loop, client = make_loop(1)

    def refuse(request: Request) -> None:
        if request.request_id == "1":
            raise RequestTooLongError("too long")

    client.on_add = refuse
    with pytest.raises(RequestTooLongError):
        loop.run(make_submissions(*[(4, 9, 1)] * 3), ignore)
    assert not client.has_unfinished


def die(client: SimulatedClient, num_taken: int) -> None:
    """Let the engine end what it has, and take no more than so many requests."""

    def refuse(request: Request) -> None:
        if int(request.request_id) >= num_taken:
            client.engine.scheduler.fail_all("the device was lost")
            raise EngineDeadError("the engine is dead: the device was lost")

    client.on_add = refuse


def test_what_an_engine_that_dies_on_the_way_does_not_take_ends_with_an_error():
    loop, client = make_loop(1)
    die(client, num_taken=1)
    shown: list[int] = []
    outputs = loop.run(make_submissions((4, 1, 1), (4, 9, 2), (4, 9, 1)), shown.append)
    ends = [[(part.finish_reason, part.error) for part in output.outputs] for output in outputs]
    error = ("error", "the engine is dead: the device was lost")
    assert ends == [[("length", None)], [error, error], [error]]
    assert sum(shown) == 3


def test_an_engine_that_is_dead_already_is_told_of():
    loop, client = make_loop(1)
    die(client, num_taken=0)
    with pytest.raises(EngineDeadError):
        loop.run(make_submissions(*[(4, 9, 1)] * 3), ignore)
    assert client.calls == ["abort 0"]
