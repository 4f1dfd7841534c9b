"""Which tokens the scheduler gives to a step: order, budget, pages and admission."""

import pytest

from jaxserve.errors import RequestTooLongError
from jaxserve.request import SequenceStatus
from jaxserve.scheduling.page_pool import PagePool
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


def test_decode_rows_come_before_prompt_rows():
    scheduler = make_scheduler(max_num_batched_tokens=8, max_steps_in_flight=4)
    scheduler.add(make_sequence("long", 20))
    first = schedule(scheduler)
    assert sizes(first) == {"long": 8} and first.num_decode_rows == 0
    commit(scheduler, first, [])
    scheduler.add(make_sequence("short", 2))
    assert sizes(schedule(scheduler)) == {"long": 8}
    assert sizes(schedule(scheduler)) == {"long": 4, "short": 2}
    scheduler.add(make_sequence("new", 2))
    mixed = schedule(scheduler)
    assert list(sizes(mixed)) == ["long", "short", "new"]
    assert [row.is_decode for row in mixed.rows] == [True, True, False]
    assert mixed.num_decode_rows == 2 and mixed.num_tokens == 4


def test_only_the_last_chunk_of_a_prompt_samples():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_sequence("r", 20))
    rows = []
    for new in ([], [], [TOKEN], [TOKEN]):
        output = schedule(scheduler)
        rows += output.rows
        commit(scheduler, output, new)
    assert [row.start for row in rows] == [0, 8, 16, 20]
    assert [row.can_sample for row in rows] == [False, False, True, True]
    assert [row.is_admission for row in rows] == [True, False, False, False]
    assert [row.is_decode for row in rows] == [False, False, False, True]


def test_a_prompts_last_token_alone_is_no_decode_row():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(make_sequence("r", 5))
    schedule(scheduler)
    (row,) = schedule(scheduler).rows
    assert row.num_scheduled_tokens == 1 and row.can_sample and not row.is_decode


def test_the_threshold_bounds_each_prompts_share():
    scheduler = make_scheduler(long_prefill_token_threshold=5)
    for name in "abc":
        scheduler.add(make_sequence(name, 9))
    assert sizes(schedule(scheduler)) == {"a": 5, "b": 5, "c": 5}
    assert sizes(schedule(scheduler)) == {"a": 4, "b": 4, "c": 4}


def test_slots_bound_the_running_sequences():
    engine = SimulatedEngine(make_scheduler(max_num_seqs=2))
    engine.add(*(make_sequence(name, seed=i) for i, name in enumerate("abc")))
    engine.step()
    assert engine.scheduler.num_running == 2 and engine.scheduler.num_waiting == 1
    engine.drain()
    assert all(len(engine.output_of(name)) == 8 for name in "abc")


def test_no_more_steps_than_allowed_are_in_flight():
    scheduler = make_scheduler(max_steps_in_flight=2)
    scheduler.add(make_sequence())
    first = schedule(scheduler)
    schedule(scheduler)
    assert scheduler.schedule() is None
    commit(scheduler, first, [TOKEN])
    assert scheduler.schedule() is not None


def test_an_idle_scheduler_has_no_step():
    scheduler = make_scheduler()
    assert scheduler.schedule() is None
    assert not scheduler.has_unfinished and scheduler.kv_cache_usage == 0


def test_a_step_that_leaves_prompt_tokens_lands_on_a_bucket():
    scheduler = make_scheduler(max_num_batched_tokens=30, token_buckets=(8, 16, 32))
    scheduler.add(make_sequence("a", 10))
    scheduler.add(make_sequence("b", 40))
    first = schedule(scheduler)
    assert sizes(first) == {"a": 10, "b": 6} and first.num_tokens == 16
    second = schedule(scheduler)
    assert sizes(second) == {"a": 1, "b": 15} and second.num_tokens == 16


def test_pages_of_tokens_that_were_cut_are_given_back():
    pool = PagePool(30, 4)
    scheduler = make_scheduler(
        pools=(pool,), max_num_batched_tokens=30, token_buckets=(8, 16, 32), max_steps_in_flight=9
    )
    engine = SimulatedEngine(scheduler)
    engine.add(make_sequence("a", 40))
    output = engine.dispatch()
    assert output is not None and sizes(output) == {"a": 16}
    assert pool.num_free == 29 - 4
    engine.drain()
    assert engine.output_of("a") == expected_output(make_sequence("a", 40))[0]


def test_all_is_taken_when_what_is_left_fits_one_bucket():
    scheduler = make_scheduler(max_num_batched_tokens=30, token_buckets=(8, 16, 32))
    scheduler.add(make_sequence("a", 13))
    scheduler.add(make_sequence("b", 14))
    assert sizes(schedule(scheduler)) == {"a": 13, "b": 14}


def test_pages_are_allocated_only_for_scheduled_tokens():
    pool = PagePool(30, 4)
    scheduler = make_scheduler(pools=(pool,), max_num_batched_tokens=8)
    scheduler.add(make_sequence("r", 9, 4))
    output = schedule(scheduler)
    assert output.rows[0].new_pages == (((0, 1), (1, 2)),)
    assert pool.num_free == 27
    (row,) = schedule(scheduler).rows
    assert row.new_pages == (((2, 3),),)
    assert scheduler.kv_cache_usage == pytest.approx(3 / 29)


def test_a_decode_row_gets_a_page_only_where_one_begins():
    scheduler = make_scheduler(page_size=4)
    scheduler.add(make_sequence("r", 3, 8))
    new_pages = []
    for _ in range(7):
        output = schedule(scheduler)
        new_pages.append(output.rows[0].new_pages)
        commit(scheduler, output, [TOKEN])
    assert new_pages == [(((0, 1),),), ((),), (((1, 2),),), ((),), ((),), ((),), (((2, 3),),)]


def test_each_cache_group_has_its_own_pages():
    pools = (PagePool(40, 2), PagePool(20, 3))
    engine = SimulatedEngine(make_scheduler(pools=pools))
    engine.add(make_sequence("a", 5, 9, seed=1), make_sequence("b", 4, 9, seed=2))
    output = engine.dispatch()
    assert output is not None
    assert [[len(pages) for pages in row.new_pages] for row in output.rows] == [[3, 2], [2, 2]]
    assert engine.scheduler.kv_cache_usage == max(5 / 39, 4 / 19)
    engine.drain()
    assert engine.output_of("b") == expected_output(make_sequence("b", 4, 9, seed=2))[0]


@pytest.mark.bugbank
def test_a_request_that_the_pool_can_never_hold_is_refused_and_blocks_no_one():
    engine = SimulatedEngine(make_scheduler(9, 16, max_model_len=4096))
    message = r"KV cache of 128 tokens \(8 pages of 16\); got 200 \+ 8"
    with pytest.raises(RequestTooLongError, match=message) as refused:
        engine.add(make_sequence("r08", 200))
    assert refused.value.parameter == "max_tokens"
    engine.add(make_sequence("small", 10))
    engine.drain()
    assert len(engine.output_of("small")) == 8


def test_a_request_that_fills_the_pool_exactly_runs():
    engine = SimulatedEngine(make_scheduler(9, 4))
    engine.add(make_sequence("r", 24, 8))
    with pytest.raises(RequestTooLongError):
        engine.add(make_sequence("longer", 24, 9))
    engine.drain()
    assert len(engine.output_of("r")) == 8


def test_the_smallest_group_decides_what_fits():
    with pytest.raises(RequestTooLongError, match="KV cache of 10 tokens"):
        make_scheduler(pools=(PagePool(100, 4), PagePool(6, 2))).add(make_sequence("r", 4, 8))


def test_a_prompt_that_leaves_no_room_under_max_model_len_is_refused():
    scheduler = make_scheduler(max_model_len=10)
    with pytest.raises(RequestTooLongError, match="at most 9 tokens.*got 10"):
        scheduler.add(make_sequence("r", 10))
    scheduler.add(make_sequence("r", 9))


def test_two_unfinished_sequences_of_one_name_are_refused():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("r"))
    with pytest.raises(ValueError, match=r"no unfinished one; got \('r', 0\)"):
        scheduler.add(make_sequence("r"))
    scheduler.add(make_sequence("r", index=1))
    assert scheduler.num_waiting == 2


def test_a_name_can_be_used_again_while_the_last_step_of_the_old_one_is_in_flight():
    engine = SimulatedEngine(make_scheduler())
    engine.add(make_sequence("r", seed=1))
    engine.dispatch()
    engine.abort("r")
    engine.add(make_sequence("r", seed=2))
    engine.drain()
    assert engine.output_of("r") == expected_output(make_sequence("r", seed=2))[0]
    assert [u.finish_reason for u in engine.finals_of("r")] == ["abort", "length"]


def test_a_sequence_waits_for_pages_for_its_whole_prompt():
    scheduler = make_scheduler(9, 4, max_num_batched_tokens=8)
    scheduler.add(make_sequence("a", 20, 4))
    scheduler.add(make_sequence("b", 16, 4))
    outputs = [schedule(scheduler), schedule(scheduler)]
    commit(scheduler, outputs[0], [])
    assert sizes(schedule(scheduler)) == {"a": 4}
    assert scheduler.num_waiting == 1 and scheduler.num_preemptions == 0


def test_no_one_is_admitted_past_the_first_that_waits():
    scheduler = make_scheduler(9, 4)
    scheduler.add(make_sequence("a", 20, 4))
    scheduler.add(make_sequence("b", 16, 4))
    scheduler.add(make_sequence("c", 1, 4))
    assert sizes(schedule(scheduler)) == {"a": 20}


def test_the_watermark_keeps_pages_free_while_others_run():
    scheduler = make_scheduler(11, 4, watermark=0.3)
    scheduler.add(make_sequence("a", 20, 4))
    scheduler.add(make_sequence("b", 12, 4))
    scheduler.add(make_sequence("c", 8, 4))
    assert sizes(schedule(scheduler)) == {"a": 20}
    alone = make_scheduler(11, 4, watermark=0.9)
    alone.add(make_sequence("a", 36, 4))
    assert sizes(schedule(alone)) == {"a": 36}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda a, b: b.page_tables[0].append(a.page_tables[0][0]), "one reference"),
        (lambda a, b: a.page_tables[0].pop(), "one reference"),
        (lambda a, b: setattr(b, "state_slot", a.state_slot), "no slot may have two owners"),
        (lambda a, b: setattr(a, "num_steps_in_flight", 5), "steps in flight and pending"),
        (lambda a, b: setattr(a, "num_pending_tokens", 0), "steps in flight and pending"),
        (lambda a, b: setattr(a, "num_computed_tokens", 99), "must hold 99 computed tokens"),
        (lambda a, b: setattr(a, "status", SequenceStatus.WAITING), "kept as RUNNING"),
    ],
)
def test_the_check_finds_damaged_books(damage, message):
    scheduler = make_scheduler()
    a, b = make_sequence("a"), make_sequence("b")
    scheduler.add(a)
    scheduler.add(b)
    schedule(scheduler)
    damage(a, b)
    with pytest.raises(RuntimeError, match=message):
        scheduler.check_invariants()


def test_page_tables_are_copies_of_who_holds_which_pages():
    scheduler = make_scheduler(page_size=4, max_num_seqs=1)
    first = make_sequence("first", 6)
    scheduler.add(first)
    scheduler.add(make_sequence("second", 6))
    assert scheduler.page_tables() == {}
    schedule(scheduler)
    tables = scheduler.page_tables()
    assert list(tables) == [("first", 0)]
    assert [len(table) for table in tables["first", 0]] == [2]
    first.page_tables[0].append(99)
    assert 99 not in tables["first", 0][0]
