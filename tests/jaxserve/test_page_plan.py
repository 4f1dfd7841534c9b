"""How the memory that is left is shared out to the cache groups."""

import math
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, Mesh

from jaxserve.errors import EngineConfigError
from jaxserve.execution.limits import Limits
from jaxserve.execution.memory_plan import RESERVED_BYTES, RememberedPlan
from jaxserve.execution.page_plan import (
    PAGE_COUNT_STEP,
    PageDemand,
    count_page_bytes,
    fill_memory,
    fits_memory,
    make_demands,
    pages_that_fit,
)
from models.kv_cache import CacheGeometry
from models.sharding import MESH_AXES, Sharder, make_mesh

GEOMETRY = CacheGeometry(
    num_layers=2, page_size=16, num_kv_heads=2, stored_head_dim=64, dtype="bfloat16"
)
PAGE_BYTES = GEOMETRY.bytes_per_page
FULL = PageDemand(bytes_per_page=PAGE_BYTES)
LIMITS = Limits(max_model_len=4096, max_num_seqs=8, max_num_batched_tokens=256)


def demands_of(*geometries: CacheGeometry, limits: Limits = LIMITS) -> tuple[PageDemand, ...]:
    return make_demands(geometries, Sharder(make_mesh()), limits, 256)


def test_a_page_holds_keys_and_values_of_all_layers() -> None:
    assert PAGE_BYTES == 16 * 2 * 2 * 2 * 64 * 2
    assert demands_of(GEOMETRY) == (FULL,)


def test_large_page_counts_are_rounded_down_and_small_ones_are_not() -> None:
    for num_pages, expected in [(2, 2), (1023, 1023), (1024, 1024), (2047, 1024), (5000, 4096)]:
        assert pages_that_fit(num_pages * PAGE_BYTES, [FULL]) == (expected,)
        assert pages_that_fit((num_pages + 1) * PAGE_BYTES - 1, [FULL]) == (expected,)


@pytest.mark.parametrize("available", [-5, 0, PAGE_BYTES, 2 * PAGE_BYTES - 1])
def test_memory_for_less_than_two_pages_is_refused_with_its_size(available: int) -> None:
    message = f"at least 2 pages of {PAGE_BYTES} bytes; got {available} bytes"
    with pytest.raises(EngineConfigError, match=message):
        pages_that_fit(available, [FULL])


def test_a_window_group_asks_for_what_its_sequences_can_hold() -> None:
    _, window = demands_of(GEOMETRY, replace(GEOMETRY, num_layers=6, sliding_window=1024))
    # A row of 256 tokens and a window of 1024: 1279 in a run, in 81 pages of 16 at most.
    assert (window.fewest, window.most) == (82, 8 * 81 + 1)
    assert (window.bytes_per_page, window.weight) == (3 * PAGE_BYTES, math.sqrt(1 / 4))
    (long,) = demands_of(replace(GEOMETRY, sliding_window=9999))
    assert (long.fewest, long.most, long.weight) == (257, 8 * 256 + 1, 1.0)


def test_a_window_group_gets_no_more_than_it_can_use_and_the_rest_goes_to_the_others() -> None:
    demands = demands_of(GEOMETRY, replace(GEOMETRY, sliding_window=1024))
    full, window = pages_that_fit(10_000 * PAGE_BYTES, demands)
    assert window == 649
    assert full == 9 * PAGE_COUNT_STEP <= 10_000 - window
    (alone,) = pages_that_fit(10_000 * PAGE_BYTES, demands[1:])
    assert alone == 649


def test_scarce_memory_is_shared_by_weight_but_leaves_every_window_to_one_sequence() -> None:
    demands = demands_of(GEOMETRY, replace(GEOMETRY, sliding_window=1024))
    assert pages_that_fit(900 * PAGE_BYTES, demands) == (600, 300)
    assert pages_that_fit(200 * PAGE_BYTES, demands) == (118, 82)
    assert pages_that_fit(100 * PAGE_BYTES, demands) == (50, 50)


def test_what_one_group_must_have_is_taken_from_the_share_of_one_that_wants_nearly_all() -> None:
    small = PageDemand(bytes_per_page=1, weight=0.1, fewest=50, most=200)
    large = PageDemand(bytes_per_page=1, weight=1.0, fewest=2, most=99)
    assert pages_that_fit(110, [small, large]) == (50, 60)


@given(
    available=st.integers(0, 1 << 42),
    windows=st.lists(st.sampled_from([None, None, 64, 512, 4096]), min_size=1, max_size=4),
    num_layers=st.integers(1, 30),
    max_num_seqs=st.sampled_from([1, 8, 1024]),
)
def test_no_plan_takes_more_than_there_is_or_leaves_a_group_without_pages(
    available, windows, num_layers, max_num_seqs
) -> None:
    limits = replace(LIMITS, max_num_seqs=max_num_seqs)
    geometries = [
        replace(GEOMETRY, num_layers=num_layers + index, sliding_window=window)
        for index, window in enumerate(windows)
    ]
    demands = demands_of(*geometries, limits=limits)
    try:
        counts = pages_that_fit(available, demands)
    except EngineConfigError:
        assert available < 2 * sum(demand.bytes_per_page for demand in demands)
        return
    assert count_page_bytes(demands, counts) <= available and min(counts) >= 2
    assert all(
        count <= (demand.most or count) for count, demand in zip(counts, demands, strict=True)
    )
    if all(window is not None for window in windows):
        return
    equal = available // sum(demand.bytes_per_page for demand in demands)
    shortest = min(count for count, window in zip(counts, windows, strict=True) if window is None)
    assert shortest > equal - PAGE_COUNT_STEP


@pytest.mark.parametrize(
    ("num_devices", "expected"), [(1, PAGE_BYTES), (2, PAGE_BYTES // 2), (4, PAGE_BYTES // 2)]
)
def test_bytes_of_a_page_are_those_that_one_device_holds(num_devices: int, expected: int) -> None:
    # With fewer KV heads than devices each device holds a whole head, and heads are copied.
    geometry = replace(GEOMETRY, num_kv_heads=max(GEOMETRY.num_kv_heads, num_devices))
    mesh = make_mesh() if num_devices == 1 else AbstractMesh((1, num_devices), MESH_AXES)
    (demand,) = make_demands((geometry,), Sharder(cast(Mesh, mesh)), LIMITS, 256)
    assert demand.bytes_per_page == expected


def test_a_plan_fits_with_its_temporaries_and_the_reserve_or_not() -> None:
    demands = demands_of(GEOMETRY, replace(GEOMETRY, sliding_window=64))
    room = RESERVED_BYTES + 1000 + 20 * PAGE_BYTES
    assert fits_memory(RememberedPlan((10, 10), 1000), demands, room)
    assert not fits_memory(RememberedPlan((10, 10), 1001), demands, room)
    assert not fits_memory(RememberedPlan((10, 11), 1000), demands, room)
    assert not fits_memory(RememberedPlan((10,), 1000), demands, room)
    assert fill_memory(demands[:1], room, 1000) == RememberedPlan((20,), 1000)
