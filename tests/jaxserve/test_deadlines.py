"""Deadlines end what is late, and give back what it held."""

import pytest

from jaxserve.errors import EngineConfigError
from jaxserve.request import FinishReason
from tests.jaxserve.scheduler_builders import make_scheduler, make_sequence
from tests.jaxserve.simulated_engine import SimulatedEngine


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


def test_a_running_request_ends_with_what_it_has_and_frees_its_pages(clock):
    engine = SimulatedEngine(make_scheduler(clock=clock))
    engine.add(make_sequence("late", timeout=5.0, max_tokens=100), make_sequence("other", seed=1))
    for _ in range(4):
        engine.step()
    clock.now = 4.9
    assert engine.take(engine.scheduler.expire()) == []
    clock.now = 5.0
    (final,) = engine.take(engine.scheduler.expire())
    assert final.finish_reason is FinishReason.TIMEOUT and final.scheduled_seconds is not None
    num_seen = len(engine.output_of("late"))
    assert 0 < num_seen < 100
    engine.drain()
    assert len(engine.output_of("late")) == num_seen
    assert engine.finals_of("other")[0].finish_reason is FinishReason.LENGTH


def test_a_request_that_never_ran_leaves_by_the_limit_of_the_queue(clock):
    engine = SimulatedEngine(make_scheduler(clock=clock, max_num_seqs=1, max_queue_seconds=2.0))
    engine.add(make_sequence("first", max_tokens=50), make_sequence("second", seed=1))
    engine.step()
    clock.now = 3.0
    (final,) = engine.take(engine.scheduler.expire())
    assert (final.request_id, final.scheduled_seconds) == ("second", None)
    assert final.finish_reason is FinishReason.TIMEOUT
    engine.drain()
    assert engine.finals_of("first")[0].finish_reason is FinishReason.LENGTH


def test_a_finished_request_is_not_late(clock):
    engine = SimulatedEngine(make_scheduler(clock=clock))
    engine.add(make_sequence("quick", timeout=1.0, max_tokens=2))
    engine.drain()
    clock.now = 10.0
    assert engine.scheduler.expire() == []


def test_the_limit_of_the_queue_is_positive():
    with pytest.raises(EngineConfigError, match="max_queue_seconds must be more than 0; got 0"):
        make_scheduler(max_queue_seconds=0)
