"""Query tiles cover each query once, and unreadable shapes are refused."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention.paged_inputs import (
    check_paged_inputs,
    max_query_tiles,
    plan_prefill_tiles,
    plan_query_tiles,
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 150), min_size=4, max_size=4),
    st.integers(0, 4),
    st.sampled_from([(64, 1), (64, 8), (128, 8)]),
)
def test_each_query_is_in_one_tile_of_its_row(lengths, first_row, sizes):
    tile_tokens, alignment = sizes
    starts = np.cumsum([0, *lengths])
    num_tokens = 640
    tiles = plan_query_tiles(
        jnp.asarray(starts, jnp.int32),
        jnp.array([first_row], jnp.int32),
        num_tokens=num_tokens,
        tile_tokens=tile_tokens,
        alignment=alignment,
    )
    owners = np.full(num_tokens, -1)
    for index in range(int(tiles.num_tiles)):
        row, first = int(tiles.row[index]), int(tiles.first_token[index])
        assert first % alignment == 0
        begin, end = max(first, starts[row]), min(first + tile_tokens, starts[row + 1])
        assert begin < end
        assert (owners[begin:end] == -1).all()
        owners[begin:end] = row
    want = np.full(num_tokens, -1)
    for row in range(first_row, 4):
        want[starts[row] : starts[row + 1]] = row
    np.testing.assert_array_equal(owners, want)
    assert (np.asarray(tiles.row[int(tiles.num_tiles) :]) == 4).all()


@pytest.mark.parametrize(("tile_tokens", "alignment"), [(64, 1), (128, 8)])
def test_the_worst_batch_fits_into_the_bound(tile_tokens, alignment):
    lengths = [1] * 31 + [512 - 31]
    tiles = plan_query_tiles(
        jnp.asarray(np.cumsum([0, *lengths]), jnp.int32),
        jnp.array([0], jnp.int32),
        num_tokens=512,
        tile_tokens=tile_tokens,
        alignment=alignment,
    )
    assert int(tiles.num_tiles) >= 31 + 4
    assert int(tiles.num_tiles) <= max_query_tiles(512, 32, tile_tokens, alignment)


def test_the_tiles_of_prefill_begin_with_those_that_see_most_keys():
    starts = jnp.array([0, 2, 130, 130, 150], jnp.int32)
    tiles, counts = plan_prefill_tiles(
        starts,
        jnp.array([1], jnp.int32),
        jnp.array([900, 200, 0, 1000], jnp.int32),
        num_tokens=160,
        tile_tokens=64,
        alignment=8,
    )
    assert counts.tolist() == [4, 2, 150]
    # Row, token of place 0, first and end of its tokens, position of place 0.
    assert tiles[:4].tolist() == [
        [3, 128, 130, 150, 978],
        [1, 128, 128, 130, 198],
        [1, 64, 64, 128, 134],
        [1, 0, 2, 64, 70],
    ]


@pytest.mark.parametrize(
    ("query", "keys", "values", "message"),
    [
        ((4, 64), (1, 2, 16, 2, 64), (1, 2, 16, 2, 64), "q must be"),
        ((1, 4, 64), (1, 2, 16, 2, 64), (1, 3, 16, 2, 64), "k_pages and v_pages must both"),
        ((1, 4, 64), (1, 2, 16, 2, 128), (1, 2, 16, 2, 128), "the pages' head dim 128"),
        ((1, 4, 64), (1, 2, 16, 3, 64), (1, 2, 16, 3, 64), "multiple of the 3 KV heads; got 4"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(query, keys, values, message):
    with pytest.raises(ValueError, match=message):
        check_paged_inputs(
            jnp.zeros(query), jnp.zeros(keys), jnp.zeros(values), jnp.zeros((1, 2), jnp.int32)
        )
