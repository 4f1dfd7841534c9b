"""The cache has the shapes and bytes that its geometry says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.kv_cache import abstract_cache, allocate_cache, cache_geometries
from tests.models.tiny_models import one_device, tiny_config


def geometries(**settings):
    config = tiny_config(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
    defaults = {"page_size": 32, "dtype": "bfloat16"}
    return cache_geometries(config, **(defaults | settings))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", [16, 128])
def test_bytes_of_the_arrays_are_bytes_per_page_times_pages(dtype, page_size):
    (geometry,) = geometries(dtype=dtype, page_size=page_size)
    cache = allocate_cache((geometry,), (5,), one_device())
    group = cache.groups[0]
    assert group.num_pages == 5
    assert group.k_pages.nbytes + group.v_pages.nbytes == 5 * geometry.bytes_per_page
    assert geometry.bytes_per_page == page_size * geometry.bytes_per_token
    assert geometry.bytes_per_token == 2 * 3 * 2 * 64 * jnp.dtype(dtype).itemsize


def test_a_new_cache_is_zeros_of_layers_pages_slots_heads_and_stored_head_dim():
    group = allocate_cache(geometries(), (4,), one_device()).groups[0]
    for pages in (group.k_pages, group.v_pages):
        assert (pages.shape, pages.dtype) == ((3, 4, 32, 2, 64), jnp.bfloat16)
        assert not np.asarray(pages, np.float32).any()


def test_keys_and_values_have_memory_of_their_own():
    group = allocate_cache(geometries(), (4,), one_device()).groups[0]
    assert group.k_pages.unsafe_buffer_pointer() != group.v_pages.unsafe_buffer_pointer()


def test_the_stored_head_dim_can_be_larger_than_needed():
    assert geometries()[0].stored_head_dim == 64
    assert geometries(stored_head_dim=256)[0].stored_head_dim == 256


def test_the_abstract_cache_has_the_allocated_ones_shapes_and_no_arrays():
    abstract = abstract_cache(geometries(), (4,), one_device())
    real = allocate_cache(geometries(), (4,), one_device())
    assert jax.tree.structure(abstract) == jax.tree.structure(real)
    for shape, array in zip(jax.tree.leaves(abstract), jax.tree.leaves(real), strict=True):
        assert isinstance(shape, jax.ShapeDtypeStruct)
        assert (shape.shape, shape.dtype, shape.sharding) == (
            array.shape,
            array.dtype,
            array.sharding,
        )


def test_replacing_one_group_keeps_the_others():
    two = geometries() + geometries(page_size=16)
    cache = allocate_cache(two, (2, 3), one_device())
    other = allocate_cache(two[1:], (7,), one_device()).groups[0]
    changed = cache.with_group(1, other)
    assert changed.groups == (cache.groups[0], other)
    assert [group.num_pages for group in cache.groups] == [2, 3]
