"""The programs that move pages: their meaning, in place, and without a transposed cache."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.execution.page_functions import (
    PAGE_CHUNK_SIZES,
    PageChunk,
    read_pages,
    write_by_loop,
    write_by_scatter,
)
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


@pytest.mark.parametrize("size", PAGE_CHUNK_SIZES)
def test_no_program_copies_the_cache(size: int) -> None:
    few, many = (
        page_programs(TWO_GROUPS, (pages, pages), 4, Sharder(make_mesh())) for pages in (70, 4096)
    )
    for group, geometry in enumerate(TWO_GROUPS):
        chunk = PageChunk(group, size)
        sizes = []
        for table, num_pages in ((few, 70), (many, 4096)):
            read = table.read_pages(chunk).memory_analysis()
            write = table.write_pages(chunk).memory_analysis()
            assert read is not None and write is not None
            assert read.alias_size_in_bytes == 0
            assert read.output_size_in_bytes >= size * geometry.bytes_per_page
            # The outputs' own table of pointers is all that is not the donated cache.
            assert write.alias_size_in_bytes == num_pages * geometry.bytes_per_page
            assert write.output_size_in_bytes - write.alias_size_in_bytes <= 64
            sizes.append((read.temp_size_in_bytes, write.temp_size_in_bytes))
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
    cache = "x".join(map(str, SHAPE))
    for text in (write, read):
        moved = [line for line in text.splitlines() if "stablehlo.transpose" in line]
        assert not any(cache in line for line in moved)
