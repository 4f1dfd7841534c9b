"""KVCache and its groups: the paged keys and values of all layers, as a pytree."""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from models.config import ModelConfig
from models.sharding import Sharder

CACHE_AXES = ("layers", "pages", "page", "kv_heads", "head_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGeometry:
    """The shape of one cache group; the group's layers share page tables.

    Attributes:
      num_layers: layers in the group.
      page_size: tokens in a page.
      num_kv_heads: KV heads of a layer.
      stored_head_dim: head dim in memory, padded to what the kernels take.
      dtype: of the stored keys and values.
      sliding_window: a query at position p sees the keys `(p - sliding_window, p]`; None = all.
    """

    num_layers: int
    page_size: int
    num_kv_heads: int
    stored_head_dim: int
    dtype: str
    sliding_window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers of the group."""
        per_head = self.stored_head_dim * jnp.dtype(self.dtype).itemsize
        return 2 * self.num_layers * self.num_kv_heads * per_head

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page in all layers of the group."""
        return self.page_size * self.bytes_per_token


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Keys and values of the layers that share page tables.

    Zeros at first. Slots behind a sequence's end may hold anything, NaN too: the kernels mask them.

    Attributes:
      k_pages: [L, P, B, K, H] in the geometry's dtype. Page 0 is the null page, never owned.
      v_pages: the same.
      geometry: static.
    """

    k_pages: jax.Array
    v_pages: jax.Array
    geometry: CacheGeometry = field(metadata={"static": True})

    @property
    def num_pages(self) -> int:
        """Pages of the group, the null page included."""
        return self.k_pages.shape[1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """All cache groups of a model. Donated to each step and rebound."""

    groups: tuple[CacheGroup, ...]

    def with_group(self, index: int, group: CacheGroup) -> "KVCache":
        """The cache with one group replaced."""
        groups = self.groups[:index] + (group,) + self.groups[index + 1 :]
        return replace(self, groups=groups)


def group_windows(config: ModelConfig) -> tuple[int | None, ...]:
    """The sliding window of each cache group, full attention first."""
    return tuple(sorted(set(config.windows), key=lambda window: window or 0))


def layer_places(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """(cache group, index within it) of each layer; layers of one window share a group."""
    groups = group_windows(config)
    return tuple(
        (groups.index(window), config.windows[:layer].count(window))
        for layer, window in enumerate(config.windows)
    )


def cache_geometries(
    config: ModelConfig, *, page_size: int, dtype: str, stored_head_dim: int | None = None
) -> tuple[CacheGeometry, ...]:
    """The cache groups of a model: one for each window that its layers have."""
    return tuple(
        CacheGeometry(
            num_layers=config.windows.count(window),
            page_size=page_size,
            num_kv_heads=config.num_key_value_heads,
            stored_head_dim=stored_head_dim or config.stored_head_dim,
            dtype=dtype,
            sliding_window=window,
        )
        for window in group_windows(config)
    )


def abstract_cache(
    geometries: tuple[CacheGeometry, ...], num_pages: tuple[int, ...], sharder: Sharder
) -> KVCache:
    """A cache of shapes only, to lower programs with."""

    def group(geometry: CacheGeometry, pages: int) -> CacheGroup:
        g = geometry
        shape = (g.num_layers, pages, g.page_size, g.num_kv_heads, g.stored_head_dim)
        array = sharder.abstract(shape, g.dtype, CACHE_AXES)
        return CacheGroup(k_pages=array, v_pages=array, geometry=geometry)  # pyright: ignore[reportArgumentType]

    return KVCache(groups=tuple(map(group, geometries, num_pages)))


def allocate_cache(
    geometries: tuple[CacheGeometry, ...], num_pages: tuple[int, ...], sharder: Sharder
) -> KVCache:
    """A cache of zeros on the device."""
    abstract = abstract_cache(geometries, num_pages, sharder)
    return sharder.zeros(abstract)
