"""Sliding windows: pages that no one sees any more are given back while the sequence runs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import EngineConfigError, RequestTooLongError
from jaxserve.scheduling.admission import max_sequence_tokens
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.windows import count_dead_pages, count_pages_of_window
from tests.jaxserve.scheduler_builders import (
    commit,
    expected_output,
    make_scheduler,
    make_sequence,
    schedule,
    sizes,
)
from tests.jaxserve.simulated_engine import SimulatedEngine

sizes_of_groups = {"window": st.integers(1, 40), "page_size": st.integers(1, 16)}


@given(next_token=st.integers(-5, 200), **sizes_of_groups)
def test_the_dead_pages_are_those_that_no_later_query_sees(next_token, window, page_size):
    first_seen = next(
        key for key in range(300) if any(key > p - window for p in range(next_token, 300))
    )
    num_dead = count_dead_pages(next_token, window=window, page_size=page_size)
    assert num_dead == first_seen // page_size


@given(num_row_tokens=st.integers(1, 40), **sizes_of_groups)
def test_the_bound_of_a_window_is_reached_and_never_passed(num_row_tokens, window, page_size):
    bound = count_pages_of_window(num_row_tokens, window=window, page_size=page_size)
    touched = [
        len({key // page_size for key in range(start - window + 1, start + num_row_tokens)})
        for start in range(window, window + page_size)
    ]
    assert max(touched) == bound


def test_a_window_without_tokens_is_refused():
    with pytest.raises(EngineConfigError, match="sliding_window must be at least 1; got 0"):
        PagePool(2, 1, sliding_window=0)


def run_alone(num_usable: int, prompt: int, output: int, **limits) -> SimulatedEngine:
    """One sequence on a pool of a window of 6, in pages of 2 tokens."""
    pool = PagePool(1 + num_usable, 2, sliding_window=6)
    engine = SimulatedEngine(make_scheduler(pools=(pool,), **limits))
    sequence = make_sequence("r", prompt, output, seed=3)
    engine.add(sequence)
    engine.drain()
    assert engine.output_of("r") == expected_output(sequence)[0]
    return engine


@pytest.mark.parametrize("max_steps_in_flight", [1, 2, 3])
def test_a_sequence_outgrows_its_pool_because_pages_come_back(max_steps_in_flight):
    # A row of 4 tokens and a window of 6: 9 tokens in a run, which touch 5 pages at most.
    limits = {"long_prefill_token_threshold": 4, "max_steps_in_flight": max_steps_in_flight}
    engine = run_alone(5, 40, 60, **limits)
    assert engine.scheduler.num_window_pages_freed == (98 - 6 + 1) // 2
    assert engine.scheduler.num_preemptions == 0
    with pytest.raises(RequestTooLongError, match="KV cache of 8 tokens"):
        run_alone(4, 40, 60, **limits)
    run_alone(4, 4, 4, **limits)


def test_a_freed_page_serves_another_row_of_the_very_same_step():
    pools = (PagePool(1 + 4, 2, sliding_window=2),)
    scheduler = make_scheduler(pools=pools, long_prefill_token_threshold=4, max_steps_in_flight=2)
    engine = SimulatedEngine(scheduler)
    old, young = make_sequence("old", 9, 3, seed=1), make_sequence("young", 4, 3, seed=2)
    engine.add(old)
    engine.dispatch()
    before = list(old.page_tables[0])
    engine.add(young)
    output = engine.dispatch()
    assert output is not None and len(engine.in_flight) == 2
    handed_out = {page for row in output.rows for _, page in row.new_pages[0]}
    assert scheduler.num_window_pages_freed == 1 and before[0] in handed_out
    assert old.page_tables[0][0] == 0 and old.num_freed_pages == [1]
    engine.drain()
    assert engine.output_of("old") == expected_output(old)[0]
    assert engine.output_of("young") == expected_output(young)[0]


def test_pages_of_full_groups_stay_while_those_of_windows_come_back():
    pools = (PagePool(50, 4), PagePool(50, 4, sliding_window=5), PagePool(50, 2, sliding_window=9))
    scheduler = make_scheduler(pools=pools)
    sequence = make_sequence("r", 20, 9)
    scheduler.add(sequence)
    commit(scheduler, schedule(scheduler), [7])
    assert sequence.num_freed_pages == [0, 0, 0]
    # At token 20 the windows begin at 16 and at 12: four pages and six lie before them.
    commit(scheduler, schedule(scheduler), [7])
    assert sequence.num_freed_pages == [0, 4, 6]
    assert sequence.page_tables[1][:4] == [0] * 4 and 0 not in sequence.page_tables[1][4:]
    assert [pool.num_usable - pool.num_free for pool in pools] == [6, 2, 5]
    assert scheduler.kv_cache_usage == 6 / 49
    assert scheduler.num_window_pages_freed == 10
    scheduler.abort("r")
    assert scheduler.kv_cache_usage == 0 and not scheduler.has_unfinished
    scheduler.check_invariants()


def test_a_cut_chunk_gives_back_its_last_pages_and_keeps_the_freed_ones():
    pools = (PagePool(30, 2, sliding_window=3),)
    scheduler = make_scheduler(pools=pools, token_buckets=(8, 16, 64), max_num_batched_tokens=18)
    sequence = make_sequence("r", 60, 4)
    scheduler.add(sequence)
    for start in (0, 16, 32):
        output = schedule(scheduler)
        assert sizes(output) == {"r": 16}
        assert sequence.num_freed_pages == [max(0, (start - 2) // 2)]
        assert len(sequence.page_tables[0]) == (start + 16) // 2
        commit(scheduler, output, [])


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_row_that_computed_less_than_it_could_still_finds_its_window(in_flight):
    pools = (PagePool(60, 1, sliding_window=3),)
    scheduler = make_scheduler(pools=pools, max_decode_row_tokens=4, max_steps_in_flight=in_flight)
    engine = SimulatedEngine(scheduler, is_eager=False)
    engine.add(*(make_sequence(f"r{i}", 3, 40, seed=i) for i in range(4)))
    engine.drain()
    assert scheduler.num_window_pages_freed > 100
    for i in range(4):
        assert engine.output_of(f"r{i}") == expected_output(make_sequence("", 3, 40, seed=i))[0]


@settings(max_examples=60, deadline=None, database=None)
@given(
    page_size=st.integers(1, 4),
    window=st.integers(1, 7),
    chunk=st.integers(4, 9),
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=2, max_size=6),
    in_flight=st.integers(1, 3),
)
def test_any_crowd_ends_on_the_pages_that_one_sequence_needs(
    page_size, window, chunk, lengths, in_flight
):
    num_usable = count_pages_of_window(chunk, window=window, page_size=page_size)
    pool = PagePool(1 + num_usable, page_size, sliding_window=window)
    scheduler = make_scheduler(
        pools=(pool,), max_num_batched_tokens=chunk, max_steps_in_flight=in_flight
    )
    engine = SimulatedEngine(scheduler)
    sequences = [make_sequence(f"r{i}", *size, seed=i) for i, size in enumerate(lengths)]
    engine.add(*sequences)
    engine.drain(4_000)
    assert sequences[0].num_preemptions == 0
    for sequence in sequences:
        output = engine.output_of(sequence.request.request_id)
        assert output == expected_output(sequence)[0]


def test_a_crowd_is_preempted_less_often_than_without_a_window():
    counts = []
    for window in (8, None):
        pools = (PagePool(25, 4, sliding_window=window),)
        engine = SimulatedEngine(make_scheduler(pools=pools))
        engine.add(*(make_sequence(f"r{i}", 10, 50, seed=i) for i in range(4)))
        engine.drain()
        counts.append(engine.scheduler.num_preemptions)
    assert counts[0] == 0 < counts[1]


def test_prompts_keep_only_the_pages_free_that_their_windows_will_need():
    # Two prompts of 40 tokens need 20 pages each in all, but 7 at the same time.
    pools = (PagePool(1 + 14, 2, sliding_window=5),)
    scheduler = make_scheduler(pools=pools, long_prefill_token_threshold=8)
    for name in "ab":
        scheduler.add(make_sequence(name, 40, 2))
    assert sizes(schedule(scheduler)) == {"a": 8, "b": 8}
    pools = (PagePool(1 + 13, 2, sliding_window=5),)
    scheduler = make_scheduler(pools=pools, long_prefill_token_threshold=8)
    for name in "ab":
        scheduler.add(make_sequence(name, 40, 2))
    assert sizes(schedule(scheduler)) == {"a": 8}


@pytest.mark.parametrize(
    ("pools", "expected"),
    [
        ((PagePool(11, 4),), 40),
        ((PagePool(11, 4, sliding_window=16),), 100),
        ((PagePool(11, 4, sliding_window=40),), 40),
        ((PagePool(30, 4), PagePool(11, 4, sliding_window=16)), 100),
        ((PagePool(20, 4), PagePool(11, 4, sliding_window=16)), 76),
    ],
)
def test_a_window_that_fits_sets_no_limit_to_the_length(pools, expected):
    assert max_sequence_tokens(pools, max_model_len=100, max_row_tokens=16) == expected
    scheduler = make_scheduler(pools=pools, max_model_len=100, max_num_batched_tokens=16)
    assert scheduler.max_tokens_per_sequence == expected


def test_the_books_find_a_page_that_was_freed_too_early():
    scheduler = make_scheduler(pools=(PagePool(30, 2, sliding_window=4),))
    sequence = make_sequence("r", 11, 8)
    scheduler.add(sequence)
    commit(scheduler, schedule(scheduler), [7])
    pool = scheduler._roster.page_pools[0]
    pool.free(sequence.page_tables[0][:5])
    sequence.page_tables[0][:5], sequence.num_freed_pages[0] = [0] * 5, 5
    with pytest.raises(RuntimeError, match="at most 4 pages of group 0 may be freed at 11; got 5"):
        scheduler.check_invariants()
    sequence.num_freed_pages[0] = 4
    with pytest.raises(RuntimeError, match="the 4 first pages of group 0 must be 0, and only they"):
        scheduler.check_invariants()


def test_the_time_of_the_first_schedule_stays_through_a_preemption():
    times = iter(np.arange(1.0, 9.0).tolist())
    scheduler = make_scheduler(7, 2, clock=lambda: next(times))
    engine = SimulatedEngine(scheduler)
    engine.add(*(make_sequence(name, 4, 6, seed=i) for i, name in enumerate("abc")))
    (update,) = engine.abort("a")
    assert update.scheduled_seconds is None
    engine.add(make_sequence("d", 4, 6, seed=4))
    engine.drain()
    assert scheduler.num_preemptions > 0
    seen = {u.request_id: u.scheduled_seconds for u in engine.updates}
    assert seen == {"a": None, "b": 1.0, "c": 2.0, "d": 3.0}
