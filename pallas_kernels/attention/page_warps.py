"""How the warps of a loading warpgroup share the pages of a tile of K and of V."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

WARPS = 4  # of a warpgroup
QUERY_WARP = 3  # fetches the queries besides


class PageTiles(NamedTuple):
    """Pages of K or of V, the tiles for them, and whether this warp fetches them."""

    pages: Any
    tiles: Any
    full: Any
    free: Any
    is_mine: jax.Array | bool


def keys_and_values(
    ring: Any, pages: tuple[Any, Any], copies: int, warp: jax.Array
) -> tuple[PageTiles, PageTiles]:
    """What a warp fetches of K and of V.

    With as many pages a tile as warps, all warps share K and V; with fewer, some K and some V.

    Args:
      ring: has tiles, and barriers that say who may touch them, under the names of `PageTiles`.
      pages: k_pages and v_pages in global memory.
      copies: pages of a tile.
      warp: which warp this is.
    """
    sharers = jnp.int32(min(copies, WARPS))
    mine = [copies >= WARPS or lax.div(warp, sharers) == kind for kind in (0, 1)]
    return (
        PageTiles(pages[0], ring.k, ring.k_full, ring.k_free, mine[0]),
        PageTiles(pages[1], ring.v, ring.v_full, ring.v_free, mine[1]),
    )


def page_places(copies: int, warp: jax.Array) -> list[jax.Array]:
    """Which pages of a tile that it fetches are this warp's."""
    sharers = min(copies, WARPS)
    place = lax.rem(warp, jnp.int32(sharers))
    return [place + index for index in range(0, copies, sharers)]
