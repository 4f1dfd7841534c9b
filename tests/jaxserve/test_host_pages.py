"""HostPages: how many there are, what they take, and what is in which slot."""

import os

import jax.numpy as jnp
import pytest

from jaxserve.errors import EngineConfigError
from jaxserve.execution.host_pages import HostPages, check_host_memory, count_host_pages
from tests.jaxserve.page_moves import TWO_GROUPS

BYTES_PER_PAGE = 2 * 2 * 16 * (3 * 2 * 8 + 2 * 4 * 4)


def test_a_slot_takes_a_page_of_every_group() -> None:
    assert count_host_pages(TWO_GROUPS, BYTES_PER_PAGE) == 1
    assert count_host_pages(TWO_GROUPS, 10 * BYTES_PER_PAGE - 1) == 9
    assert count_host_pages(TWO_GROUPS, 0) == 0


@pytest.mark.parametrize("num_bytes", [1, BYTES_PER_PAGE - 1])
def test_bytes_that_hold_no_page_are_refused(num_bytes: int) -> None:
    rule = rf"^kv_offloading_size must hold at least a page of {BYTES_PER_PAGE} bytes; got"
    with pytest.raises(EngineConfigError, match=rule):
        count_host_pages(TWO_GROUPS, num_bytes)


def test_more_than_the_host_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 20}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    check_host_memory(4 << 30)
    with pytest.raises(EngineConfigError, match=r"at most the host's memory, 4.00 GiB; got 5.00"):
        check_host_memory(5 << 30)


def test_all_bytes_are_counted_and_a_slot_gives_what_it_was_last_given() -> None:
    pages = HostPages(TWO_GROUPS, 5)
    assert sum(pages.bytes_per_page(group) for group in range(2)) == BYTES_PER_PAGE
    first, second, third = (jnp.full(3, value) for value in range(3))
    pages.put(1, [4, 0], [first, second])
    pages.put(0, [4], [third])
    pages.put(1, [0], [third])
    assert pages.get(1, [0, 4, 0]) == [third, first, third]
    for group, slot in ((0, 0), (1, 3)):
        with pytest.raises(AssertionError, match=f"slots .{slot}. of group {group} must have been"):
            pages.get(group, [slot])
    pages.clear()
    with pytest.raises(AssertionError, match="must have been filled"):
        pages.get(1, [4])
