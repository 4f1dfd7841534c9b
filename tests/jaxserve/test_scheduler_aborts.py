"""Sequences are aborted in each state and give back all that they own."""

import random

import pytest

from jaxserve.request import FinishReason, SequenceStatus
from tests.jaxserve.scheduler_builders import (
    TOKEN,
    commit,
    expected_output,
    make_scheduler,
    make_sequence,
    schedule,
)
from tests.jaxserve.simulated_engine import SimulatedEngine


def test_a_waiting_sequence_is_aborted_at_once():
    scheduler = make_scheduler()
    sequence = make_sequence()
    scheduler.add(sequence)
    (update,) = scheduler.abort("r")
    assert update.finish_reason is FinishReason.ABORT
    assert sequence.status is SequenceStatus.FINISHED and not scheduler.has_unfinished


@pytest.mark.parametrize("prompt", [4, 20], ids=["decode", "chunk"])
def test_a_running_sequence_leaves_when_its_steps_are_known(prompt):
    scheduler = make_scheduler(max_num_batched_tokens=8)
    sequence = make_sequence("r", prompt)
    scheduler.add(sequence)
    outputs = [schedule(scheduler), schedule(scheduler)]
    (update,) = scheduler.abort("r")
    scheduler.check_invariants()
    assert update.finish_reason is FinishReason.ABORT
    assert sequence.status is SequenceStatus.LEAVING and scheduler.kv_cache_usage > 0
    for output in outputs:
        assert commit(scheduler, output, [TOKEN] if output.rows[0].can_sample else []) == []
    assert sequence.status is SequenceStatus.FINISHED and scheduler.kv_cache_usage == 0


def test_an_unknown_or_finished_request_is_ignored():
    scheduler = make_scheduler()
    scheduler.add(make_sequence())
    assert len(scheduler.abort("r")) == 1
    assert scheduler.abort("r") == scheduler.abort("unknown") == scheduler.abort("r", 3) == []


def test_one_sequence_or_all_of_a_request_are_aborted():
    scheduler = make_scheduler()
    for index in range(3):
        scheduler.add(make_sequence("r", index=index, seed=index))
    output = schedule(scheduler)
    assert [u.index for u in scheduler.abort("r", 1)] == [1]
    assert [u.index for u in commit(scheduler, output, *[[TOKEN]] * 3)] == [0, 2]
    assert [u.index for u in scheduler.abort("r")] == [0, 2]


def test_a_stop_string_keeps_only_the_tokens_that_the_client_saw():
    scheduler = make_scheduler(max_steps_in_flight=3)
    sequence = make_sequence("r")
    scheduler.add(sequence)
    outputs = [schedule(scheduler) for _ in range(3)]
    commit(scheduler, outputs[0], [TOKEN])
    commit(scheduler, outputs[1], [TOKEN])
    (update,) = scheduler.abort(
        "r", 0, finish_reason=FinishReason.STOP, stop_reason="END", num_output_tokens=1
    )
    scheduler.check_invariants()
    assert (update.finish_reason, update.stop_reason) == (FinishReason.STOP, "END")
    assert update.new_token_ids == () and sequence.num_output_tokens == 1
    assert commit(scheduler, outputs[2], [TOKEN]) == []
    assert sequence.num_output_tokens == 1 and not scheduler.has_unfinished


def test_a_negative_number_of_kept_tokens_is_refused():
    with pytest.raises(ValueError, match="num_output_tokens must be at least 0; got -1"):
        make_scheduler().abort("r", num_output_tokens=-1)


@pytest.mark.bugbank
def test_slots_return_after_a_thousand_aborts_at_random_times():
    engine, chance = SimulatedEngine(make_scheduler(30)), random.Random(47)
    for number in range(1000):
        name = f"r{number}"
        engine.add(make_sequence(name, chance.randint(1, 30), seed=number))
        for _ in range(chance.randint(0, 4)):
            engine.step()
        engine.abort(name)
        assert len(engine.finals_of(name)) == 1
        engine.updates.clear()
    engine.add(*(make_sequence(f"last{i}", seed=i) for i in range(4)))
    engine.drain(10_000)
    assert all(len(engine.output_of(f"last{i}")) == 8 for i in range(4))


@pytest.mark.bugbank
def test_a_client_that_leaves_after_its_first_token_harms_not_its_next_turn():
    engine = SimulatedEngine(make_scheduler(9, 4))
    for turn in range(50):
        engine.add(make_sequence(f"left{turn}", 12, 12, seed=turn))
        while not engine.output_of(f"left{turn}"):
            engine.step()
        engine.abort(f"left{turn}")
        engine.add(make_sequence(f"next{turn}", 16, 12, seed=turn))
        engine.drain()
        expected = expected_output(make_sequence("", 16, 12, seed=turn))[0]
        assert engine.output_of(f"next{turn}") == expected
        engine.num_steps = 0


@pytest.mark.bugbank
def test_aborting_those_that_wait_leaks_nothing():
    engine = SimulatedEngine(make_scheduler())
    engine.add(*(make_sequence(f"r{i}", seed=i) for i in range(40)))
    engine.step()
    for number in range(4, 40):
        engine.abort(f"r{number}")
    assert engine.scheduler.num_waiting == 0
    engine.drain()
    assert sum(len(engine.output_of(f"r{i}")) for i in range(40)) == 4 * 8
