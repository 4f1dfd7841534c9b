"""CopyOnWrite in the scheduler: who waits, who copies what, and what becomes of the sources."""

import pytest

from jaxserve.scheduling.page_cache import PageCache
from jaxserve.scheduling.page_digests import PageDigests, root_digest
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.partial_pages import MAX_PAGES_PER_PREFIX, PartialPages
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

PARENT, OTHER = root_digest("a"), root_digest("b")


def content_of(*token_ids: int) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in token_ids)


def make_engine(**limits) -> SimulatedEngine:
    return SimulatedEngine(make_scheduler(enable_prefix_caching=True, **limits))


def make_siblings(n: int, num_prompt_tokens: int = 10, max_tokens: int = 8, **fields):
    shared = (1, num_prompt_tokens)
    return [
        make_sequence(
            "r", num_prompt_tokens, max_tokens, seed=5 + i, index=i, n=n, shared=shared, **fields
        )
        for i in range(n)
    ]


def assert_outputs(engine: SimulatedEngine, *sequences) -> None:
    for sequence in sequences:
        output = engine.output_of(sequence.request.request_id, sequence.index)
        assert output == expected_output(sequence)[0]


def test_the_page_that_begins_with_the_most_tokens_is_found():
    pages = PartialPages()
    assert pages.find(PARENT, content_of(1)) == (0, 0)
    for page, content in ((7, (1, 2, 3)), (8, (1, 2, 4, 5)), (9, (6,))):
        assert pages.add(page, PARENT, content_of(*content)) is None
    assert pages.find(PARENT, content_of(1, 2, 4, 6)) == (8, 3)
    assert pages.find(PARENT, content_of(1, 2, 3, 9)) == (7, 3)
    assert pages.find(PARENT, content_of(1)) == (7, 1)
    # Tokens that differ in their last byte alone, or in the first.
    assert pages.find(PARENT, content_of(1, 2 + (1 << 24), 3)) == (7, 1)
    assert pages.find(PARENT, content_of(257, 2, 3)) == (0, 0)
    assert pages.find(OTHER, content_of(1, 2, 3)) == (0, 0)
    pages.check_invariants()


def test_few_pages_are_kept_behind_a_prefix_and_none_that_begins_as_another():
    pages = PartialPages()
    for page in range(1, MAX_PAGES_PER_PREFIX + 1):
        assert pages.add(page, PARENT, content_of(page, page)) is None
    assert pages.add(50, PARENT, content_of(1)) is None and 50 not in pages
    assert pages.add(1, PARENT, content_of(1, 1, 9)) is None  # the same page, fuller
    assert pages.find(PARENT, content_of(1, 1, 9)) == (1, 3)
    assert pages.add(51, PARENT, content_of(2, 2, 8)) == 2  # which is as good as the page before
    assert 2 not in pages and pages.find(PARENT, content_of(2, 2, 9)) == (51, 2)
    assert pages.add(52, PARENT, content_of(52)) == 1
    assert 1 not in pages and pages.find(PARENT, content_of(1, 1)) == (0, 0)
    assert pages.add(53, OTHER, content_of(52)) is None
    pages.check_invariants()
    for page, _, _ in pages.items():
        pages.drop(page)
    assert pages.items() == [] and not pages._pages


def test_the_check_finds_a_page_that_stands_behind_two_prefixes():
    pages = PartialPages()
    pages.add(1, PARENT, content_of(1))
    pages.add(1, OTHER, content_of(1))
    with pytest.raises(RuntimeError, match="partial pages must stand once"):
        pages.check_invariants()


def test_an_idle_page_that_is_forgotten_is_blank_again_and_a_held_one_is_not():
    pool = PagePool(MAX_PAGES_PER_PREFIX + 4, 4)
    pages = pool.allocate(MAX_PAGES_PER_PREFIX + 2) or []
    for page in pages[:MAX_PAGES_PER_PREFIX]:
        pool.add_partial(page, PARENT, content_of(page))
    pool.free(pages[:1])
    assert pool.num_cached == 1 and pages[0] not in pool.blank_pages
    pool.add_partial(pages[-2], PARENT, content_of(90))
    assert pool.num_cached == 0 and pages[0] in pool.blank_pages
    pool.add_partial(pages[-1], PARENT, content_of(91))
    assert pages[1] not in pool.blank_pages and pages[1] not in pool.cache
    pool.check_invariants()


def test_a_page_that_becomes_full_is_known_by_all_its_tokens():
    cache, tokens = PageCache(), [3, 1, 4, 1]
    (name,) = PageDigests(PARENT, tokens, 4).up_to(1)
    cache.add_partial(1, PARENT, content_of(3, 1))
    cache.add(1, name)
    assert cache.find(name) == 1
    assert cache.partials.find(PARENT, content_of(3, 1, 4, 8)) == (1, 3)
    assert cache.retire([1, 2]) == [2], "of the two only the first is cached"
    assert cache.evict() == (1, name)
    assert 1 not in cache and cache.partials.find(PARENT, content_of(3, 1)) == (0, 0)
    cache.check_invariants()


def test_siblings_wait_for_the_whole_prompt_and_compute_its_last_token():
    engine = make_engine()
    siblings = make_siblings(4)
    engine.add(*siblings)
    first, second = engine.dispatch(), engine.dispatch()
    assert first is not None and second is not None
    assert [row.num_scheduled_tokens for row in first.rows] == [10]
    assert second.num_decode_rows == 1 == len(second.rows)
    engine.collect()
    third = engine.dispatch()
    assert third is not None and len(third.copies) == 3
    assert [(row.start, row.num_scheduled_tokens) for row in third.rows[1:]] == [(9, 1)] * 3
    assert len({copy.source for copy in third.copies}) == 1
    assert siblings[0].page_tables[0][2] == third.copies[0].source
    engine.drain()
    assert_outputs(engine, *siblings)


def test_a_prompt_whose_end_is_cut_off_keeps_its_siblings_waiting_for_one_step_more():
    scheduler = make_scheduler(
        enable_prefix_caching=True,
        max_num_batched_tokens=9,
        token_buckets=(9,),
        max_steps_in_flight=1,
    )
    for sibling in make_siblings(2):
        scheduler.add(sibling)
    for num_tokens in (9, 1):
        output = schedule(scheduler)
        assert [row.num_scheduled_tokens for row in output.rows] == [num_tokens]
        commit(scheduler, output, [TOKEN] if num_tokens == 1 else [])
    output = schedule(scheduler)
    assert [row.num_scheduled_tokens for row in output.rows] == [1, 1] and len(output.copies) == 1


@pytest.mark.parametrize("num_tokens", [3, 4])
def test_nobody_waits_for_a_page_that_is_all_of_a_prompt(num_tokens: int):
    scheduler = make_scheduler(enable_prefix_caching=True)
    for sibling in make_siblings(3, num_tokens):
        scheduler.add(sibling)
    assert [row.num_scheduled_tokens for row in schedule(scheduler).rows] == [num_tokens] * 3


@pytest.mark.parametrize("ending", ["abort", "fail"])
def test_who_waits_for_the_end_of_a_prompt_that_never_comes_computes_it(ending: str):
    engine = make_engine(max_num_batched_tokens=9, token_buckets=(9,), max_steps_in_flight=1)
    siblings = make_siblings(2)
    engine.add(*siblings)
    engine.step()
    assert siblings[0].promised_tail and siblings[1].scheduled_seconds is None
    if ending == "abort":
        engine.abort("r", 0)
    else:
        output = engine.scheduler.schedule()
        assert output is not None
        engine.take(engine.scheduler.fail_step(output, "it raised"))
    assert not siblings[0].promised_tail and not engine.scheduler._roster.prefixes._promised
    output = engine.dispatch()
    assert output is not None and sizes(output) == {"r": 2} and not output.copies
    engine.drain()
    assert_outputs(engine, siblings[1])


def test_a_source_is_held_until_the_step_is_built_and_may_be_taken_by_the_next():
    # 4 usable pages: 2 full ones, the source, and its copy.
    engine = make_engine(num_pages=5, max_num_seqs=1)
    engine.add(make_sequence("a", 10, 1, seed=1))
    engine.drain()
    (pool,) = engine.page_pools
    assert pool.num_cached == 3
    again = make_sequence("b", 11, 5, seed=2, shared=(1, 10))
    engine.add(again)
    output = engine.dispatch()
    assert output is not None
    (copy,) = output.copies
    assert pool.cache.is_idle(copy.source) and pool.num_references(copy.source) == 0
    while len(again.page_tables[0]) < 4:  # all that there are
        engine.step()
    assert copy.source in again.page_tables[0] and copy.page in again.page_tables[0]
    engine.drain()
    assert_outputs(engine, again)


def test_a_source_is_not_given_out_in_the_step_that_copies_it():
    # Of 5 usable pages 4 are idle, 2 of each: a full one, and one with 2 tokens.
    engine = make_engine(num_pages=6)
    for seed, name in ((1, "a"), (2, "b")):
        engine.add(make_sequence(name, 6, 1, seed=seed))
        engine.drain()
    first = make_sequence("c", 7, 1, seed=3, shared=(1, 6))
    second = make_sequence("d", 7, 1, seed=4, shared=(2, 6))
    engine.add(first, second)
    output = engine.dispatch()
    assert output is not None and [row.start for row in output.rows] == [6, 4]
    (copy,) = output.copies
    assert copy.source not in second.page_tables[0] and engine.page_pools[0].num_free == 1
    engine.drain()
    assert_outputs(engine, first, second)


def test_a_pool_without_room_for_the_source_does_without_the_copy():
    # 4 usable pages, all of which the second sequence needs; its first two hold 8 of 15 tokens.
    engine = make_engine(num_pages=5)
    engine.add(make_sequence("a", 10, 1, seed=1))
    engine.drain()
    second = make_sequence("b", 15, 1, seed=2, shared=(1, 10))
    engine.add(second)
    assert engine.scheduler._roster.prefixes.find(second).num_tokens == 10
    output = engine.dispatch()
    assert output is not None and not output.copies and output.rows[0].start == 8
    engine.drain()
    assert_outputs(engine, second)


def test_a_step_that_is_taken_back_leaves_its_sources_and_copies_anew():
    engine = make_engine()
    first, second = (
        make_sequence("a", 10, 2, seed=1),
        make_sequence("b", 14, 4, seed=2, shared=(1, 10)),
    )
    engine.add(first)
    engine.drain()
    engine.add(second)
    output = engine.scheduler.schedule()
    assert output is not None and len(output.copies) == 1
    engine.scheduler.retry_step(output)
    engine.scheduler.check_invariants()
    again = engine.dispatch()
    assert again is not None and again.copies[0].source == output.copies[0].source
    assert again.rows[0].start == 10
    engine.drain()
    assert_outputs(engine, first, second)


def test_what_a_preempted_sequence_has_computed_of_its_last_page_is_copied_when_it_comes_back():
    engine = make_engine(max_steps_in_flight=1)
    sequence = make_sequence("a", 6, 12, seed=1)
    engine.add(sequence)
    for _ in range(4):
        engine.step()
    output = engine.scheduler.schedule()
    assert output is not None
    engine.scheduler.retry_step(output)
    num_known = len(sequence.token_ids)
    output = engine.dispatch()
    assert output is not None
    assert (output.rows[0].start, output.rows[0].num_scheduled_tokens) == (num_known - 1, 1)
    engine.drain()
    assert_outputs(engine, sequence)


def test_a_partial_page_is_dropped_when_it_is_evicted_and_does_not_go_to_the_host():
    pool = PagePool(5, 4, num_host_pages=8)
    engine = make_engine(pools=(pool,))
    engine.add(make_sequence("a", 6, 1, seed=1))
    engine.drain()
    assert pool.num_cached == 2
    engine.add(make_sequence("b", 15, 1, seed=2))
    engine.drain()
    assert engine.device.num_offloads == 1 and len(pool.host) == 1
