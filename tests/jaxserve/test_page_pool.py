"""PagePool and SlotPool keep their books."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import EngineConfigError
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.slot_pool import SlotPool


def test_the_null_page_is_never_given_out():
    pool = PagePool(5, 16)
    assert pool.num_free == pool.num_usable == 4
    pages = pool.allocate(4)
    assert pages == [1, 2, 3, 4]
    assert pool.num_free == 0
    pool.check_invariants()


def test_an_allocation_gives_all_pages_or_none():
    pool = PagePool(5, 16)
    assert pool.allocate(5) is None
    assert pool.num_free == 4
    assert pool.allocate(0) == []
    assert len(pool.allocate(3) or []) == 3
    assert pool.allocate(2) is None
    assert pool.num_free == 1


def test_a_shared_page_comes_free_with_its_last_reference():
    pool = PagePool(3, 16)
    pages = pool.allocate(1)
    assert pages is not None
    pool.take_cached(pages)
    assert pool.num_references(pages[0]) == 2
    pool.free(pages)
    assert pool.num_free == 1
    pool.free(pages)
    assert pool.num_free == 2
    pool.check_invariants()


@pytest.mark.parametrize("page", [0, 1, 3, -1])
def test_a_page_that_is_not_given_out_can_be_neither_freed_nor_shared(page):
    pool = PagePool(3, 16)
    with pytest.raises(ValueError, match=f"gave out and not free; got {page}"):
        pool.free([page])
    with pytest.raises(ValueError, match=f"gave out and not free; got {page}"):
        pool.take_cached([page])


def test_a_page_that_is_freed_twice_stops_there_and_the_books_stay_right():
    pool = PagePool(6, 16)
    assert pool.allocate(4) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="gave out and not free; got 2"):
        pool.free([1, 2, 2, 3])
    pool.check_invariants()
    assert [pool.num_references(page) for page in range(1, 5)] == [0, 0, 1, 1]
    assert pool.allocate(2) == [2, 1], "freed last, given out first"


def test_pages_are_counted_for_whole_and_partial_pages():
    pool = PagePool(3, 16)
    assert [pool.num_pages_for(n) for n in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


def test_impossible_sizes_are_refused():
    with pytest.raises(EngineConfigError, match="num_pages must be at least 2; got 1"):
        PagePool(1, 16)
    with pytest.raises(EngineConfigError, match="page_size must be at least 1; got 0"):
        PagePool(2, 0)
    with pytest.raises(ValueError, match="num_pages must be at least 0; got -1"):
        PagePool(2, 1).allocate(-1)


def test_the_check_finds_a_page_that_is_both_free_and_held():
    pool = PagePool(4, 16)
    pool.allocate(2)
    pool._free.append(1)
    with pytest.raises(RuntimeError, match="must add up to 3; got 2 free and 2 held"):
        pool.check_invariants()
    pool._free.remove(3)
    with pytest.raises(RuntimeError, match="must have no reference"):
        pool.check_invariants()


def test_the_check_finds_a_page_that_is_free_twice():
    pool = PagePool(4, 16)
    pool._free[0] = pool._free[1]
    with pytest.raises(RuntimeError, match="must be distinct"):
        pool.check_invariants()


@settings(max_examples=100, deadline=None, database=None)
@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "free"]), st.integers(0, 5))))
def test_any_sequence_of_operations_ends_with_all_pages_free(operations):
    pool, held = PagePool(9, 4), []
    for kind, number in operations:
        if kind == "allocate":
            pages = pool.allocate(number)
            assert (pages is None) == (number > 8 - len({p for ps in held for p in ps}))
            held += [pages] if pages else []
        elif held and kind == "share":
            pool.take_cached(held[number % len(held)])
            held.append(held[number % len(held)])
        elif held:
            pool.free(held.pop(number % len(held)))
        pool.check_invariants()
    for pages in held:
        pool.free(pages)
    assert pool.num_free == 8
    pool.check_invariants()


def test_slots_are_given_out_once_and_come_back():
    pool = SlotPool(2)
    assert [pool.allocate(), pool.allocate(), pool.allocate()] == [0, 1, None]
    assert pool.num_free == 0
    pool.free(1)
    assert pool.num_free == 1
    assert pool.allocate() == 1
    pool.check_invariants()


@pytest.mark.parametrize("slot", [0, 2, -1])
def test_a_slot_that_is_not_owned_cannot_be_freed(slot):
    with pytest.raises(ValueError, match=f"gave out and not free; got {slot}"):
        SlotPool(2).free(slot)


def test_a_pool_without_slots_is_refused():
    with pytest.raises(EngineConfigError, match="max_num_seqs must be at least 1; got 0"):
        SlotPool(0)


def test_the_check_finds_a_slot_that_is_free_and_owned():
    pool = SlotPool(2)
    pool.allocate()
    pool._free.append(0)
    with pytest.raises(RuntimeError, match=r"free slots must be \[1\]; got \[0, 1\]"):
        pool.check_invariants()
