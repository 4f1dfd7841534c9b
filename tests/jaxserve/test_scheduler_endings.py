"""How commit takes in tokens and ends sequences."""

import pytest

from jaxserve.request import FinishReason, SequenceStatus
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.step import TokenLogprobs
from tests.jaxserve.scheduler_builders import (
    EOS,
    STOP_ID,
    TOKEN,
    commit,
    expected_output,
    make_scheduler,
    make_sequence,
    schedule,
    sizes,
)
from tests.jaxserve.simulated_engine import SimulatedEngine


@pytest.mark.parametrize("max_steps_in_flight", [1, 2, 3])
def test_no_step_is_scheduled_past_the_length_end(max_steps_in_flight):
    scheduler = make_scheduler(3, 4, max_steps_in_flight=max_steps_in_flight)
    scheduler.add(make_sequence("r", 4, 4))
    outputs, updates = [], []
    while scheduler.has_unfinished:
        while (output := scheduler.schedule()) is not None:
            outputs.append(output)
        updates += commit(scheduler, outputs.pop(0), [TOKEN])
    assert len(updates) == 4 and not outputs
    assert [u.finish_reason for u in updates] == [None, None, None, FinishReason.LENGTH]


def test_max_model_len_ends_a_sequence_too():
    engine = SimulatedEngine(make_scheduler(max_model_len=10, max_steps_in_flight=3))
    engine.add(make_sequence("r", 4, 100))
    engine.drain()
    assert len(engine.output_of("r")) == 6
    assert engine.finals_of("r")[0].finish_reason is FinishReason.LENGTH


def test_without_max_tokens_a_sequence_runs_to_max_model_len():
    scheduler = make_scheduler(max_model_len=10)
    sequence = make_sequence("r", 4)
    sequence.request.sampling_params.max_tokens = None
    scheduler.add(sequence)
    assert sequence.max_num_tokens == 10


@pytest.mark.parametrize(
    ("token", "params", "reason", "stop_reason"),
    [
        (EOS, {"ignore_eos": False}, FinishReason.STOP, None),
        (EOS, {}, None, None),
        (STOP_ID, {"stop_token_ids": [STOP_ID]}, FinishReason.STOP, STOP_ID),
        (EOS, {"stop_token_ids": [EOS]}, FinishReason.STOP, EOS),
        (EOS, {"stop_token_ids": [EOS], "ignore_eos": False}, FinishReason.STOP, None),
        (EOS, {"ignore_eos": False, "min_tokens": 2}, None, None),
        (STOP_ID, {"stop_token_ids": [STOP_ID], "min_tokens": 2}, None, None),
        (EOS, {"ignore_eos": False, "max_tokens": 1}, FinishReason.STOP, None),
        (TOKEN, {"ignore_eos": False, "max_tokens": 1}, FinishReason.LENGTH, None),
    ],
)
def test_the_first_token_ends_a_sequence_by_the_rules(token, params, reason, stop_reason):
    scheduler = make_scheduler()
    scheduler.add(make_sequence("r", 4, **{"max_tokens": 8, **params}))
    (update,) = commit(scheduler, schedule(scheduler), [token])
    assert update.new_token_ids == (token,)
    assert (update.finish_reason, update.stop_reason) == (reason, stop_reason)


def test_an_ending_id_counts_from_min_tokens_on():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("r", min_tokens=2, ignore_eos=False))
    (first,) = commit(scheduler, schedule(scheduler), [EOS])
    (second,) = commit(scheduler, schedule(scheduler), [EOS])
    assert first.finish_reason is None and second.finish_reason is FinishReason.STOP


def test_an_ended_sequence_reports_at_once_and_owns_its_pages_until_its_steps_are_known():
    pool = PagePool(30, 4)
    scheduler = make_scheduler(pools=(pool,), max_steps_in_flight=3)
    sequence = make_sequence("r", ignore_eos=False)
    scheduler.add(sequence)
    outputs = [schedule(scheduler) for _ in range(3)]
    (update,) = commit(scheduler, outputs[0], [EOS])
    assert update.finish_reason is FinishReason.STOP
    assert sequence.status is SequenceStatus.LEAVING and pool.num_free == 27
    assert scheduler.has_unfinished and scheduler.schedule() is None
    assert commit(scheduler, outputs[1], []) == []
    assert pool.num_free == 27
    assert commit(scheduler, outputs[2], []) == []
    assert sequence.status is SequenceStatus.FINISHED and pool.num_free == 29
    assert not scheduler.has_unfinished and sequence.num_output_tokens == 1


def test_tokens_after_the_end_are_neither_emitted_nor_counted():
    scheduler = make_scheduler(max_decode_row_tokens=4, max_num_batched_tokens=64)
    sequence = make_sequence("r", stop_token_ids=[STOP_ID], max_tokens=9)
    scheduler.add(sequence)
    commit(scheduler, schedule(scheduler), [TOKEN])
    entries = tuple(TokenLogprobs(-1.0, 1, (t,), (-1.0,)) for t in (TOKEN, STOP_ID, TOKEN))
    output = schedule(scheduler)
    late = schedule(scheduler)
    (update,) = commit(scheduler, output, [TOKEN, STOP_ID, TOKEN], logprobs=(entries,))
    assert update.new_token_ids == (TOKEN, STOP_ID) and update.logprobs == entries[:2]
    assert update.stop_reason == STOP_ID and sequence.num_output_tokens == 3
    assert commit(scheduler, late, [TOKEN, TOKEN, TOKEN, TOKEN]) == []
    assert sequence.num_output_tokens == 3


def test_a_row_may_return_fewer_tokens_than_it_reserved():
    scheduler = make_scheduler(max_decode_row_tokens=4, max_steps_in_flight=1)
    scheduler.add(make_sequence("r", 4, 8))
    commit(scheduler, schedule(scheduler), [TOKEN])
    rows, kept = [], []
    for new in ([TOKEN] * 2, [TOKEN] * 3, [TOKEN], [TOKEN]):
        output = schedule(scheduler)
        rows += output.rows
        kept.append(commit(scheduler, output, new)[0])
    assert [(row.start, row.num_scheduled_tokens) for row in rows] == [
        (4, 4),
        (6, 4),
        (9, 1),  # two are left, which is less than half of four and one more
        (10, 1),
    ]
    assert kept[-1].finish_reason is FinishReason.LENGTH


def test_a_row_that_returns_more_tokens_than_it_reserved_is_refused_and_harms_nothing():
    scheduler = make_scheduler()
    scheduler.add(make_sequence())
    output = schedule(scheduler)
    with pytest.raises(ValueError, match=r"num_new must be at most \[1\].*got \[2\]"):
        commit(scheduler, output, [TOKEN, TOKEN])
    assert len(commit(scheduler, output, [TOKEN])) == 1


def test_a_result_with_too_few_rows_is_refused():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a"))
    scheduler.add(make_sequence("b"))
    with pytest.raises(ValueError, match=r"num_new must be at most \[1, 1\].*got \[1\]"):
        commit(scheduler, schedule(scheduler), [TOKEN])


def test_steps_are_committed_in_order():
    scheduler = make_scheduler()
    scheduler.add(make_sequence())
    schedule(scheduler)
    with pytest.raises(ValueError, match="must be the oldest step in flight"):
        commit(scheduler, schedule(scheduler), [TOKEN])


def test_a_row_that_is_not_finite_ends_alone():
    engine = SimulatedEngine(make_scheduler(), poisoned={2})
    engine.add(make_sequence("good", seed=1), make_sequence("bad", seed=2))
    engine.drain()
    (final,) = engine.finals_of("bad")
    assert final.finish_reason is FinishReason.ERROR
    assert final.error == "logits must be finite; got NaN, or no finite value"
    assert final.new_token_ids == () == tuple(engine.output_of("bad"))
    assert engine.output_of("good") == expected_output(make_sequence("good", seed=1))[0]


def test_a_running_row_that_samples_nothing_ends_with_an_error_instead_of_hanging():
    scheduler = make_scheduler()
    scheduler.add(make_sequence())
    (update,) = commit(scheduler, schedule(scheduler), [])
    assert update.finish_reason is FinishReason.ERROR
    assert update.error == "the step must sample at least 1 token for a running row; got 0"


def test_a_step_that_raised_fails_its_sequences_and_no_other():
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_sequence(name))
    first = schedule(scheduler)
    second = schedule(scheduler)
    updates = scheduler.fail_step(second, "out of memory")
    scheduler.check_invariants()
    assert [(u.request_id, u.finish_reason, u.error) for u in updates] == [
        ("a", FinishReason.ERROR, "out of memory"),
        ("b", FinishReason.ERROR, "out of memory"),
    ]
    assert commit(scheduler, first, [TOKEN], [TOKEN]) == []
    assert sizes(schedule(scheduler)) == {"c": 4}
    assert scheduler.kv_cache_usage == pytest.approx(1 / 100)
