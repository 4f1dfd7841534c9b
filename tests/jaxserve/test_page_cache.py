"""PageCache: what was found last is found again without a look, and never when it has gone."""

from unittest import mock

import pytest

from jaxserve.scheduling.page_cache import PageCache
from jaxserve.scheduling.page_digests import PageDigests, PageName, root_digest

NUM_PAGES = 6


def names_of(first: int, *, num_shared: int = 0) -> list[PageName]:
    """Of a prompt that shares its first pages with that of `first` 0."""
    ids = [position for position in range(4 * num_shared)]
    ids += [first + position for position in range(4 * num_shared, 4 * NUM_PAGES)]
    return PageDigests(root_digest(None), ids, 4).up_to(NUM_PAGES)


NAMES, OTHERS = names_of(0), names_of(1000)


@pytest.fixture
def cache() -> PageCache:
    """Pages 1 to 6 hold a prompt, and 11 to 16 another one; the memo is that of the first."""
    cache = PageCache()
    for start, names in ((1, NAMES), (11, OTHERS)):
        for page, name in enumerate(names, start):
            cache.add(page, name)
    assert cache.find_first(NAMES) == [1, 2, 3, 4, 5, 6]
    return cache


def count_looks(cache: PageCache, names: list[PageName]) -> tuple[list[int], int]:
    """The pages that are found, and how many names were looked up for them."""
    with mock.patch.object(cache, "find", wraps=cache.find) as find:
        return cache.find_first(names), find.call_count


def test_the_pages_found_last_are_not_looked_up_again(cache: PageCache) -> None:
    assert count_looks(cache, NAMES) == ([1, 2, 3, 4, 5, 6], 0)
    assert count_looks(cache, NAMES[:4]) == ([1, 2, 3, 4], 4)
    assert count_looks(cache, NAMES) == ([1, 2, 3, 4, 5, 6], 2)


def test_another_prefix_gets_its_own_pages(cache: PageCache) -> None:
    assert count_looks(cache, OTHERS) == ([11, 12, 13, 14, 15, 16], 6)
    parting = names_of(2000, num_shared=3)
    assert parting[:3] == NAMES[:3]
    assert cache.find_first(parting) == [1, 2, 3]
    assert cache.find_first(names_of(3000)) == []
    assert count_looks(cache, NAMES) == ([1, 2, 3, 4, 5, 6], 3)  # the parting one came last


def test_a_part_from_the_middle_is_not_taken_for_one_from_the_start(cache: PageCache) -> None:
    assert cache.find_first(NAMES[2:4]) == [3, 4]
    assert count_looks(cache, NAMES[2:]) == ([3, 4, 5, 6], 2)
    assert cache.find_first(NAMES[:4]) == [1, 2, 3, 4]
    assert cache.find_first(NAMES[4:]) == [5, 6]
    assert cache.find_first(NAMES) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("page", [1, 4, 6])
def test_an_evicted_page_ends_what_is_found(cache: PageCache, page: int) -> None:
    assert cache.retire([page]) == []
    assert cache.find_first(NAMES) == [1, 2, 3, 4, 5, 6], "idle pages are found"
    assert cache.evict() == (page, NAMES[page - 1])
    assert cache.find_first(NAMES) == list(range(1, page))
    cache.add(30, NAMES[page - 1])  # the same tokens, in another page
    found = [30 if number == page else number for number in range(1, 7)]
    assert cache.find_first(NAMES) == found
    cache.check_invariants()


def test_an_evicted_partial_page_leaves_the_full_ones(cache: PageCache) -> None:
    cache.add_partial(20, NAMES[-1][0], b"\x01\0\0\0")
    assert cache.retire([20]) == []
    assert cache.evict() == (20, None)
    assert count_looks(cache, NAMES) == ([1, 2, 3, 4, 5, 6], 0)


def test_nothing_is_found_after_all_is_forgotten(cache: PageCache) -> None:
    cache.clear()
    assert cache.find_first(NAMES) == []
    cache.add(9, NAMES[0])
    assert cache.find_first(NAMES) == [9]


def test_who_changes_what_was_found_changes_nothing_here(cache: PageCache) -> None:
    for _ in range(2):
        cache.find_first(NAMES).clear()
    assert cache.find_first(NAMES) == [1, 2, 3, 4, 5, 6]
