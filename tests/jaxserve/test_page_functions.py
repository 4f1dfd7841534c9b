"""The programs that move pages: their meaning, in place, and without a transposed cache."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.execution.packed_layout import NUM_PAGE_COPIES
from jaxserve.execution.page_functions import (
    PAGE_CHUNK_SIZES,
    PageChunk,
    fetch_pages,
    lower_copy,
    offload_pages,
    read_pages,
    write_by_loop,
    write_by_scatter,
)
from models.kv_cache import abstract_cache, allocate_cache
from models.sharding import Sharder, make_mesh
from tests.jaxserve.page_moves import TWO_GROUPS, page_programs

SHAPE = (3, 9, 16, 2, 8)


def random_array(shape: tuple[int, ...], seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


def test_pages_are_read_layer_by_layer() -> None:
    keys, values, ids = random_array(SHAPE, 0), random_array(SHAPE, 1), jnp.array([7, 1, 0, 7])
    for pages, found in zip((keys, values), read_pages(keys, values, ids), strict=True):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_array_equal(found, np.asarray(pages)[:, ids].swapaxes(0, 1))


@pytest.mark.parametrize("write", [write_by_scatter, write_by_loop])
def test_both_versions_write_the_named_pages_and_no_others(write: Callable[..., Any]) -> None:
    pages, new, ids = random_array(SHAPE, 0), random_array((4, 3, 16, 2, 8), 1), [5, 2, 0, 0]
    expected = np.asarray(pages).copy()
    expected[:, [5, 2]] = np.asarray(new)[:2].swapaxes(0, 1)
    found = np.asarray(write(pages, jnp.array(ids), new))
    np.testing.assert_array_equal(found[:, 1:], expected[:, 1:])


def test_pages_go_out_one_by_one_and_come_back_to_the_named_pages_and_no_others() -> None:
    keys, values, ids = random_array(SHAPE, 0), random_array(SHAPE, 1), jnp.array([7, 1, 0, 7])
    moved = jax.jit(offload_pages)(keys, values, ids)
    for page_id, page in zip(ids, moved, strict=True):
        np.testing.assert_array_equal(page, np.stack([keys[:, page_id], values[:, page_id]]))
    targets = random_array(SHAPE, 2), random_array(SHAPE, 3)
    found = jax.jit(fetch_pages)(*targets, jnp.array([5, 2, 0, 0]), *moved)
    for source, target, pages in zip((keys, values), targets, found, strict=True):
        expected = np.array(target)
        expected[:, [5, 2, 0]] = np.asarray(source)[:, [7, 1, 7]]
        np.testing.assert_array_equal(pages, expected)


@pytest.mark.parametrize("size", PAGE_CHUNK_SIZES)
def test_no_program_copies_the_cache(size: int) -> None:
    few, many = (
        page_programs(TWO_GROUPS, (pages, pages), 4, Sharder(make_mesh())) for pages in (70, 4096)
    )
    for group, geometry in enumerate(TWO_GROUPS):
        chunk = PageChunk(group, size)
        sizes = []
        for table, num_pages in ((few, 70), (many, 4096)):
            offload = table.offload(chunk).memory_analysis()
            fetch = table.fetch(chunk).memory_analysis()
            assert offload is not None and fetch is not None
            assert offload.alias_size_in_bytes == 0
            assert offload.output_size_in_bytes >= size * geometry.bytes_per_page
            # The outputs' own table of pointers is all that is not the donated cache.
            assert fetch.alias_size_in_bytes == num_pages * geometry.bytes_per_page
            assert fetch.output_size_in_bytes - fetch.alias_size_in_bytes <= 64
            sizes.append((offload.temp_size_in_bytes, fetch.temp_size_in_bytes))
            assert sum(sizes[-1]) <= geometry.bytes_per_page
        assert sizes[0] == sizes[1]


def test_on_a_gpu_the_leading_axes_are_indexed_and_no_cache_is_transposed() -> None:
    pages = jax.ShapeDtypeStruct(SHAPE, "bfloat16")
    new, ids = (
        jax.ShapeDtypeStruct((8, 3, 16, 2, 8), "bfloat16"),
        jax.ShapeDtypeStruct((8,), "int32"),
    )

    def lower(function: Callable[..., Any], *shapes: jax.ShapeDtypeStruct) -> str:
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()

    write = lower(write_by_scatter, pages, ids, new)
    assert write.count('"stablehlo.scatter"') == 1
    assert re.search(r"scatter_dims_to_operand_dims = \[0, 1\]", write)
    read = lower(read_pages, pages, pages, ids)
    assert read.count('"stablehlo.gather"') == 2
    assert len(re.findall(r"start_index_map = \[0, 1\]", read)) == 2
    page = jax.ShapeDtypeStruct((2, 3, 16, 2, 8), "bfloat16")
    offload, fetch = (
        lower(offload_pages, pages, pages, ids),
        lower(fetch_pages, pages, pages, ids, *[page] * 8),
    )
    assert offload.count('"stablehlo.gather"') == fetch.count('"stablehlo.scatter"') == 0
    assert "stablehlo.dynamic_slice" in offload and "stablehlo.dynamic_update_slice" in fetch
    cache = "x".join(map(str, SHAPE))
    for text in (write, read, offload, fetch):
        moved = [line for line in text.splitlines() if "stablehlo.transpose" in line]
        assert not any(cache in line for line in moved)


def test_pages_are_copied_in_all_groups_and_padding_changes_nothing() -> None:
    sharder, num_pages = Sharder(make_mesh()), (70, 40)
    cache = allocate_cache(TWO_GROUPS, num_pages, sharder)
    seeds = iter(range(4))
    cache = jax.tree.map(
        lambda leaf: jax.device_put(random_array(leaf.shape, next(seeds)), leaf.sharding), cache
    )
    expected = [np.asarray(leaf).copy() for leaf in jax.tree.leaves(cache)]
    pairs = np.zeros((2, 2, NUM_PAGE_COPIES), np.int32)
    pairs[:, 0, :3] = [[5, 5, 69], [6, 1, 7]]
    pairs[:, 1, :1] = [[39], [2]]
    for index, pages in enumerate(expected):
        sources, targets = pairs[:, index // 2]
        pages[:, targets] = pages[:, sources]
    copied = lower_copy(abstract_cache(TWO_GROUPS, num_pages, sharder), sharder).compile()(
        cache, pairs
    )
    for found, pages in zip(jax.tree.leaves(copied), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(found), pages)


def test_pages_are_copied_in_place() -> None:
    sharder, num_pages = Sharder(make_mesh()), (70, 40)
    cache = allocate_cache(TWO_GROUPS, num_pages, sharder)
    program = lower_copy(abstract_cache(TWO_GROUPS, num_pages, sharder), sharder).compile()
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)]
    copied = program(cache, np.ones((2, 2, NUM_PAGE_COPIES), np.int32))
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(copied)] == places


def test_the_program_that_copies_pages_holds_no_more_than_these() -> None:
    sizes, sharder = [], Sharder(make_mesh())
    for num_pages in (70, 4096):
        cache = abstract_cache(TWO_GROUPS, (num_pages, num_pages), sharder)
        memory = lower_copy(cache, sharder).compile().memory_analysis()
        assert memory is not None
        page_bytes = sum(geometry.bytes_per_page for geometry in TWO_GROUPS)
        assert memory.alias_size_in_bytes == num_pages * page_bytes
        assert memory.output_size_in_bytes - memory.alias_size_in_bytes <= 64
        sizes.append(memory.temp_size_in_bytes)
        assert sizes[-1] <= (NUM_PAGE_COPIES + 2) * page_bytes
    assert sizes[0] == sizes[1]
