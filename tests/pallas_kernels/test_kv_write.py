"""Both ways to write keys and values do what a loop over tokens does, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.fused.kv_write import write_by_loop, write_by_scatter

L, P, B, K, H = 3, 5, 16, 2, 8
WRITES = [write_by_loop, write_by_scatter]


def make_pages(dtype: str) -> tuple[np.ndarray, jax.Array]:
    values = np.random.default_rng(0).normal(size=(L, P, B, K, H)).astype(jnp.dtype(dtype))
    return values, jnp.asarray(values)


def written_one_by_one(pages: np.ndarray, layer: int, slots: np.ndarray, new: np.ndarray):
    want = pages.copy()
    for token, slot in enumerate(slots):
        want[layer, slot // B, slot % B] = new[token].astype(pages.dtype)
    return want


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_tokens", [1, 7, 40])
def test_tokens_go_to_their_slots_and_all_other_slots_stay(write, dtype, num_tokens):
    rng = np.random.default_rng(num_tokens)
    values, pages = make_pages(dtype)
    slots = rng.permutation(np.arange(B, P * B))[:num_tokens].astype(np.int32)
    new = rng.normal(size=(num_tokens, K, H)).astype(np.float32)
    layer = num_tokens % L
    got = write(pages, jnp.array([layer], jnp.int32), jnp.asarray(slots), jnp.asarray(new))
    assert got.dtype == pages.dtype
    want = written_one_by_one(values, layer, slots, new)
    np.testing.assert_array_equal(np.asarray(got), want)
    assert (want != values).any(axis=(-1, -2)).sum() == num_tokens


@pytest.mark.parametrize("write", WRITES)
def test_padding_touches_the_null_page_of_its_layer_alone(write):
    values, pages = make_pages("float32")
    slots = jnp.array([2 * B + 3, 0, 0, 0, 5], jnp.int32)
    new = jnp.ones((5, K, H))
    got = np.array(write(pages, jnp.array([1], jnp.int32), slots, new))
    want = written_one_by_one(values, 1, np.asarray(slots), np.asarray(new))
    np.testing.assert_array_equal(got[:, 1:], want[:, 1:])
    np.testing.assert_array_equal(got[[0, 2]], values[[0, 2]])
    assert np.isfinite(got).all()


@pytest.mark.parametrize("num_tokens", [1, 64])
def test_the_loop_updates_a_donated_cache_in_place_in_every_layer(num_tokens):
    """On CPU a scatter would copy the cache; the program is only compiled, nothing is allocated."""
    pages = jax.ShapeDtypeStruct((4, 800, 16, 8, 64), jnp.float32)
    num_bytes = 4 * int(np.prod(pages.shape))
    assert num_bytes > 100e6

    def write_all_layers(pages, slots, new):
        for layer in range(4):
            pages = write_by_loop(pages, jnp.array([layer], jnp.int32), slots, new)
        return pages

    slots = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    new = jax.ShapeDtypeStruct((num_tokens, 8, 64), jnp.float32)
    jitted = jax.jit(write_all_layers, donate_argnums=0)
    analysis = jitted.lower(pages, slots, new).compile().memory_analysis()
    assert analysis is not None
    assert analysis.alias_size_in_bytes >= num_bytes
    assert analysis.temp_size_in_bytes < 1e6
