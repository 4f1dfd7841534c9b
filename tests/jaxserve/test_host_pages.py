"""HostPages: how many there are, what they take, and that copies are copies."""

import os

import ml_dtypes
import numpy as np
import pytest

from jaxserve.errors import EngineConfigError
from jaxserve.execution.host_pages import HostPages, check_host_memory, count_host_pages
from tests.jaxserve.page_moves import TWO_GROUPS, bits

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


def test_slots_have_the_shape_and_type_of_the_groups_pages_and_all_bytes_are_counted() -> None:
    pages = HostPages(TWO_GROUPS, 5)
    assert [array.shape for array in pages.k_pages] == [(5, 3, 16, 2, 8), (5, 2, 16, 4, 4)]
    assert {array.dtype for array in pages.k_pages + pages.v_pages} == {
        np.dtype(ml_dtypes.bfloat16)
    }
    assert pages.num_bytes == 5 * BYTES_PER_PAGE
    assert pages.num_bytes == 5 * sum(pages.bytes_per_page(group) for group in range(2))


def test_what_was_read_does_not_change_when_its_slot_is_written() -> None:
    pages = HostPages(TWO_GROUPS, 5)
    rng = np.random.default_rng(0)
    rows = [
        rng.integers(0, 256, (4, 3, 16, 2, 16), np.uint8).view(ml_dtypes.bfloat16) for _ in range(4)
    ]
    pages.write(0, [4, 0, 2], rows[0], rows[1])
    keys, values = pages.read(0, [2, 4], 8)
    assert keys.shape == values.shape == (8, 3, 16, 2, 8)
    pages.write(0, [4, 0, 2], rows[2], rows[3])
    for found, written in ((keys, rows[0]), (values, rows[1])):
        np.testing.assert_array_equal(bits(found)[:2], bits(written)[[2, 0]])
    for found, written in zip(pages.read(0, [0, 2], 2), rows[2:], strict=True):
        np.testing.assert_array_equal(bits(found), bits(written)[[1, 2]])
