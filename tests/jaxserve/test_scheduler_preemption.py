"""Preemption frees pages by the rules and changes no token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.request import FinishReason, SequenceStatus
from jaxserve.scheduling.page_pool import PagePool
from tests.jaxserve.scheduler_builders import (
    expected_output,
    make_scheduler,
    make_sequence,
    sizes,
    token_at,
)
from tests.jaxserve.simulated_engine import SimulatedEngine


def run_pair(num_pages: int, order: tuple[int, ...] = (1, 2), **limits) -> SimulatedEngine:
    """Two requests of 34 + 35 tokens, the shape that another engine got wrong."""
    engine = SimulatedEngine(make_scheduler(num_pages, 16, max_num_batched_tokens=64, **limits))
    engine.add(*(make_sequence(f"r{seed}", 34, 35, seed=seed) for seed in order))
    engine.drain()
    for seed in order:
        assert (
            engine.output_of(f"r{seed}") == expected_output(make_sequence("", 34, 35, seed=seed))[0]
        )
    return engine


@pytest.mark.bugbank
@pytest.mark.parametrize("max_steps_in_flight", [1, 2, 3])
def test_a_preempted_sequence_gives_the_same_tokens(max_steps_in_flight):
    short = run_pair(8, max_steps_in_flight=max_steps_in_flight)
    assert short.scheduler.num_preemptions > 0
    assert short.finals_of("r1")[0].num_preemptions == 0
    assert short.finals_of("r2")[0].num_preemptions > 0
    assert run_pair(11).scheduler.num_preemptions == 0


@pytest.mark.bugbank
@settings(max_examples=40, deadline=None, database=None)
@given(num_pages=st.integers(6, 13), order=st.permutations([1, 2, 3]), in_flight=st.integers(1, 3))
def test_any_small_pool_and_order_give_the_same_tokens(num_pages, order, in_flight):
    run_pair(num_pages, tuple(order), max_steps_in_flight=in_flight)


def make_crowded(max_steps_in_flight: int = 2) -> tuple[SimulatedEngine, PagePool]:
    """Three sequences on 6 pages of 2 tokens: all pages are held after the first step."""
    pool = PagePool(7, 2)
    engine = SimulatedEngine(make_scheduler(pools=(pool,), max_steps_in_flight=max_steps_in_flight))
    engine.add(*(make_sequence(name, 4, 6, seed=i) for i, name in enumerate("abc")))
    engine.dispatch()
    assert pool.num_free == 0
    return engine, pool


def statuses(engine: SimulatedEngine, *names: str) -> list[SequenceStatus]:
    return [engine.scheduler._roster.find(name, 0)[0].status for name in names]


def test_the_victim_is_the_last_to_arrive_and_keeps_its_pages_until_its_steps_are_known():
    engine, pool = make_crowded()
    assert engine.dispatch() is None
    assert engine.scheduler.num_preemptions == 1
    assert statuses(engine, "a", "b", "c") == [
        SequenceStatus.RUNNING,
        SequenceStatus.RUNNING,
        SequenceStatus.LEAVING,
    ]
    assert pool.num_free == 0
    engine.collect()
    assert statuses(engine, "c") == [SequenceStatus.WAITING] and pool.num_free == 2
    (victim,) = engine.scheduler._roster.find("c", 0)
    assert victim.num_computed_tokens == 0 and victim.num_output_tokens == 1
    output = engine.dispatch()
    assert output is not None and sizes(output) == {"a": 1, "b": 1}


def test_a_victim_gets_no_row_in_the_step_that_preempts_it():
    engine = SimulatedEngine(make_scheduler(7, 2))
    sizes_by_name = {"a": 4, "b": 4, "c": 3}
    engine.add(*(make_sequence(name, size, 5) for name, size in sizes_by_name.items()))
    engine.dispatch()
    assert engine.dispatch() is None
    assert statuses(engine, "c") == [SequenceStatus.LEAVING]


def test_no_one_is_admitted_into_pages_that_a_running_row_waits_for():
    engine = SimulatedEngine(make_scheduler(10, 1, long_prefill_token_threshold=2))
    engine.add(make_sequence("a", 2, 7, seed=1), make_sequence("b", 6, 3, seed=2))
    engine.dispatch()
    engine.dispatch()
    engine.collect()
    engine.add(make_sequence("tiny", 1, 1, seed=3))
    output = engine.dispatch()
    assert output is not None and sizes(output) == {"a": 1}
    assert engine.scheduler.num_waiting == 1 and engine.page_pools[0].num_free == 1


@pytest.mark.parametrize("max_steps_in_flight", [1, 2, 3])
def test_an_old_prompt_preempts_though_a_younger_decode_row_was_skipped_first(max_steps_in_flight):
    scheduler = make_scheduler(
        13, 1, long_prefill_token_threshold=2, max_steps_in_flight=max_steps_in_flight
    )
    engine = SimulatedEngine(scheduler)
    old, young = make_sequence("old", 10, 2, seed=1), make_sequence("young", 1, 8, seed=2)
    engine.add(old, young)
    engine.drain()
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    assert engine.output_of("young") == expected_output(young)[0]


def test_no_more_are_preempted_than_needed_while_pages_are_about_to_come_free():
    engine, _ = make_crowded(max_steps_in_flight=3)
    for _ in range(3):
        assert engine.dispatch() is None
    assert engine.scheduler.num_preemptions == 1


def test_a_victim_without_steps_in_flight_gives_its_pages_at_once():
    engine, _ = make_crowded(max_steps_in_flight=1)
    engine.collect()
    output = engine.dispatch()
    assert output is not None and sizes(output) == {"a": 1, "b": 1}
    assert engine.scheduler.num_preemptions == 1 and statuses(engine, "c") == [
        SequenceStatus.WAITING
    ]


def test_a_preempted_sequence_goes_to_the_front_of_those_that_wait():
    engine, _ = make_crowded()
    engine.add(make_sequence("late", 1, 1, seed=9))
    while not engine.scheduler.num_preemptions:
        engine.step()
    waiting = [s.request.request_id for s in engine.scheduler._roster.waiting]
    assert waiting == ["c", "late"]
    engine.drain()
    order = [u.request_id for u in engine.updates if u.finish_reason]
    assert order.index("late") > order.index("a")


def test_no_one_is_admitted_while_a_preempted_sequence_is_leaving_ahead():
    engine = SimulatedEngine(make_scheduler(max_steps_in_flight=9))
    engine.add(make_sequence("a", seed=1), make_sequence("b", seed=2))
    engine.dispatch()
    engine.scheduler._roster.preempt_last()
    engine.add(make_sequence("tiny", 1, seed=3))
    output = engine.dispatch()
    assert output is not None and sizes(output) == {"a": 1}
    engine.collect()
    output = engine.dispatch()
    assert output is not None and sizes(output) == {"a": 1, "b": 5, "tiny": 1}
    assert [row.is_admission for row in output.rows] == [False, True, True]
    engine.drain()
    assert engine.output_of("b") == expected_output(make_sequence("b", seed=2))[0]


def test_the_last_to_arrive_waits_for_a_page_and_preempts_no_one():
    engine = SimulatedEngine(make_scheduler(5, 2))
    engine.add(make_sequence("a", 3, 3, seed=1), make_sequence("b", 4, 3, seed=2))
    engine.dispatch()
    output = engine.dispatch()
    assert output is not None and sizes(output) == {"a": 1}
    assert engine.scheduler.num_preemptions == 0 and engine.scheduler.num_running == 2


def test_rows_behind_a_skipped_one_get_no_page_in_that_step():
    pools = (PagePool(7, 2), PagePool(50, 4))
    engine = SimulatedEngine(make_scheduler(pools=pools))
    engine.add(*(make_sequence(name, 4, 6, seed=i) for i, name in enumerate("abc")))
    engine.dispatch()
    free = pools[1].num_free
    assert engine.dispatch() is None
    assert pools[1].num_free == free
    engine.drain()


def test_admission_never_preempts():
    pool = PagePool(7, 2)
    engine = SimulatedEngine(make_scheduler(pools=(pool,)))
    engine.add(make_sequence("a", 8, 2, seed=1), make_sequence("b", 8, 2, seed=2))
    engine.drain()
    assert engine.scheduler.num_preemptions == 0
    assert [u.request_id for u in engine.updates if u.finish_reason] == ["a", "b"]


def test_a_preempted_sequence_that_ends_in_its_last_step_does_not_wait_again():
    engine, _ = make_crowded()
    engine.dispatch()
    output, result = engine.in_flight.popleft()
    (victim,) = engine.scheduler._roster.find("c", 0)
    victim.end_token_ids = frozenset({token_at(2, 4)})
    victim.request.sampling_params.stop_token_ids = [token_at(2, 4)]
    engine.take(engine.scheduler.commit(output, result))
    assert victim.status is SequenceStatus.FINISHED and engine.scheduler.num_waiting == 0
    assert [u.finish_reason for u in engine.finals_of("c")] == [FinishReason.STOP]
    engine.drain()


def test_a_preempted_sequence_is_aborted_while_it_leaves_and_while_it_waits():
    for num_collected in (0, 1):
        engine, pool = make_crowded()
        engine.dispatch()
        for _ in range(num_collected):
            engine.collect()
        (victim,) = engine.scheduler._roster.find("c", 0)
        is_leaving = victim.status is SequenceStatus.LEAVING
        assert is_leaving == (num_collected == 0)
        assert len(engine.abort("c")) == 1 and engine.scheduler.num_waiting == 0
        assert (pool.num_free == 0) == is_leaving
        engine.drain()
        assert len(engine.finals_of("c")) == 1 and victim.status is SequenceStatus.FINISHED


@pytest.mark.bugbank
def test_forty_eight_requests_finish_on_a_pool_for_two():
    engine = SimulatedEngine(make_scheduler(12, 4, max_num_seqs=48))
    engine.add(*(make_sequence(f"r{i}", 4 + i % 5, 12, seed=i) for i in range(48)))
    engine.drain()
    assert engine.scheduler.num_preemptions > 0
    for i in range(48):
        assert (
            engine.output_of(f"r{i}")
            == expected_output(make_sequence("", 4 + i % 5, 12, seed=i))[0]
        )


@settings(max_examples=60, deadline=None, database=None)
@given(
    page_size=st.integers(1, 4),
    lengths=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=2, max_size=6),
    in_flight=st.integers(1, 3),
)
def test_the_oldest_sequence_is_never_preempted_and_always_ends_first_in_bounded_steps(
    page_size, lengths, in_flight
):
    num_pages = 1 + max(-(-(prompt + output) // page_size) for prompt, output in lengths)
    scheduler = make_scheduler(num_pages, page_size, max_steps_in_flight=in_flight)
    engine = SimulatedEngine(scheduler)
    engine.add(*(make_sequence(f"r{i}", *size, seed=i) for i, size in enumerate(lengths)))
    bound = lengths[0][1] * (1 + in_flight)
    while not engine.finals_of("r0"):
        engine.step()
        assert engine.num_steps <= bound
    assert engine.finals_of("r0")[0].num_preemptions == 0
    engine.drain()
