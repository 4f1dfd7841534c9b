"""Steps that are taken back to run again, and the limit of tokens that follows from them."""

import pytest

from jaxserve.request import FinishReason, SequenceStatus
from jaxserve.scheduling.token_limit import STEPS_BEFORE_GROWTH
from tests.jaxserve.scheduler_builders import (
    TOKEN,
    commit,
    expected_output,
    make_scheduler,
    make_sequence,
    schedule,
    sizes,
)
from tests.jaxserve.simulated_engine import SimulatedEngine


def retry_newest(engine: SimulatedEngine) -> None:
    """Take the newest step back; the device forgets nothing of what it did, as in life."""
    output, _ = engine.in_flight.pop()
    engine.scheduler.retry_step(output)
    engine.scheduler.check_invariants()


@pytest.mark.parametrize("max_decode_row_tokens", [1, 3])
@pytest.mark.parametrize("max_steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_steps_that_are_taken_back_lose_and_repeat_no_token(
    max_decode_row_tokens: int, max_steps_in_flight: int, enable_prefix_caching: bool
) -> None:
    scheduler = make_scheduler(
        max_steps_in_flight=max_steps_in_flight,
        max_decode_row_tokens=max_decode_row_tokens,
        enable_prefix_caching=enable_prefix_caching,
        max_num_batched_tokens=16,
        token_buckets=(16,),
    )
    engine = SimulatedEngine(scheduler, is_eager=False)
    sequences = [make_sequence(f"r{i}", 9 + i, 20, seed=i, ignore_eos=False) for i in range(6)]
    engine.add(*sequences)
    for number in range(200):
        if not scheduler.has_unfinished:
            break
        engine.dispatch()
        if number % 4 == 1 and engine.in_flight:
            retry_newest(engine)
        if engine.in_flight and (number % 3 or len(engine.in_flight) == max_steps_in_flight):
            engine.collect()
    engine.drain()
    for sequence in sequences:
        name = sequence.request.request_id
        output, reason = expected_output(sequence)
        assert engine.output_of(name) == output
        assert [u.finish_reason for u in engine.finals_of(name)] == [reason]
    assert scheduler.num_preemptions > 10


def test_a_step_that_is_taken_back_leaves_the_order_of_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    engine = SimulatedEngine(scheduler)
    engine.add(*(make_sequence(name, seed=i) for i, name in enumerate("abcde")))
    engine.step()
    engine.dispatch()
    retry_newest(engine)
    while engine.in_flight:
        engine.collect()
    assert list(sizes(schedule(scheduler))) == ["a", "b", "c"]


def test_only_the_newest_step_can_be_taken_back() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence())
    first, second = schedule(scheduler), schedule(scheduler)
    with pytest.raises(ValueError, match="must be the newest step in flight"):
        scheduler.retry_step(first)
    scheduler.retry_step(second)
    scheduler.retry_step(first)
    with pytest.raises(ValueError, match="must be the newest step in flight"):
        scheduler.retry_step(first)
    scheduler.check_invariants()
    assert sizes(schedule(scheduler)) == {"r": 4}


def test_a_sequence_that_ended_meanwhile_does_not_come_back() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a"))
    scheduler.add(make_sequence("b"))
    output = schedule(scheduler)
    scheduler.abort("a")
    scheduler.retry_step(output)
    scheduler.check_invariants()
    assert sizes(schedule(scheduler)) == {"b": 4}


def test_a_sequence_that_runs_beside_the_step_keeps_its_place() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    scheduler.add(make_sequence("last token", max_tokens=2))
    scheduler.add(make_sequence("b"))
    first = schedule(scheduler)
    second, third = schedule(scheduler), None
    commit(scheduler, first, [TOKEN], [TOKEN])
    third = schedule(scheduler)
    assert sizes(third) == {"b": 1}
    scheduler.retry_step(third)
    updates = commit(scheduler, second, [TOKEN], [TOKEN])
    assert [(u.request_id, u.finish_reason) for u in updates] == [
        ("last token", FinishReason.LENGTH),
        ("b", None),
    ]
    assert sizes(schedule(scheduler)) == {"b": 6}


def test_a_failed_step_without_memory_halves_the_next_and_success_doubles_them() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64, row_buckets=(4,))
    scheduler.add(make_sequence("a", 200, 40))
    may_try_again = []
    for expected in (64, 32, 16, 8, 4, 4, 4):
        output = schedule(scheduler)
        assert output.num_tokens == expected
        may_try_again.append(scheduler.lower_token_limit(output))
        scheduler.retry_step(output)
    assert may_try_again == [True] * 6 + [False]
    seen = []
    for _ in range(2 * STEPS_BEFORE_GROWTH):
        output = schedule(scheduler)
        seen.append(output.num_tokens)
        commit(scheduler, output, [])
    assert seen == [4] * STEPS_BEFORE_GROWTH + [8] * STEPS_BEFORE_GROWTH


def test_a_limit_below_the_running_sequences_holds_back_admissions_alone() -> None:
    scheduler = make_scheduler(max_num_seqs=4, row_buckets=(2, 4))
    engine = SimulatedEngine(scheduler)
    engine.add(*(make_sequence(name, seed=i) for i, name in enumerate("abcd")))
    output = schedule(scheduler)
    for _ in range(3):
        assert scheduler.lower_token_limit(output)
    scheduler.retry_step(output)
    most = 0
    while scheduler.has_unfinished:
        while (output := engine.dispatch()) is not None:
            most = max(most, output.num_tokens)
        engine.collect()
    assert most == 2 and scheduler.num_preemptions == 4
    for index, name in enumerate("abcd"):
        assert engine.output_of(name) == expected_output(make_sequence(name, seed=index))[0]


def test_a_lost_cache_is_computed_again_and_never_looked_up() -> None:
    scheduler = make_scheduler(enable_prefix_caching=True)
    engine = SimulatedEngine(scheduler)
    engine.add(make_sequence("a", 20, seed=1), make_sequence("b", 20, seed=2))
    engine.step()
    with pytest.raises(RuntimeError, match="no step must be in flight"):
        scheduler.drop_cache()
    while engine.in_flight:
        retry_newest(engine)
    scheduler.drop_cache()
    scheduler.check_invariants()
    assert not any(pool.num_cached for pool in engine.page_pools)
    engine.device._memory.clear()
    engine.device._slots.clear()
    engine.drain()
    assert engine.device.num_cached_tokens == 0
    for seed, name in ((1, "a"), (2, "b")):
        assert engine.output_of(name) == expected_output(make_sequence(name, 20, seed=seed))[0]


def test_everything_can_end_with_an_error_whatever_is_in_flight() -> None:
    scheduler = make_scheduler(max_num_seqs=2, num_pages=8, enable_prefix_caching=True)
    engine = SimulatedEngine(scheduler)
    sequences = [make_sequence(name, 8, 12, seed=i) for i, name in enumerate("abc")]
    engine.add(*sequences)
    for _ in range(6):
        engine.step()
    engine.dispatch()
    updates = scheduler.fail_all("the device failed")
    scheduler.check_invariants()
    assert sorted(u.request_id for u in updates) == ["a", "b", "c"]
    assert {(u.finish_reason, u.error) for u in updates} == {
        (FinishReason.ERROR, "the device failed")
    }
    assert {s.status for s in sequences} == {SequenceStatus.FINISHED}
    assert not scheduler.has_unfinished and scheduler.kv_cache_usage == 0
    assert scheduler.fail("again", sequences) == []
