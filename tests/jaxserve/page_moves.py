"""A cache, host slots and a mover over real programs, beside a plain numpy model of both."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.execution.batch_builder import BatchBuilder
from jaxserve.execution.buckets import BucketTable
from jaxserve.execution.device_state import DeviceState
from jaxserve.execution.host_pages import HostPages
from jaxserve.execution.page_functions import HOST_MEMORY
from jaxserve.execution.page_mover import PageMover
from jaxserve.execution.programs import ProgramShapes, ProgramTable
from jaxserve.step import PageMove
from models.kv_cache import CacheGeometry, KVCache, abstract_cache, allocate_cache
from models.sharding import Sharder, make_mesh
from tests.jaxserve.toy_steps import FUNCTIONS

ONE_GROUP = (
    CacheGeometry(num_layers=3, page_size=16, num_kv_heads=2, stored_head_dim=8, dtype="float32"),
)
TWO_GROUPS = (
    CacheGeometry(num_layers=3, page_size=16, num_kv_heads=2, stored_head_dim=8, dtype="bfloat16"),
    CacheGeometry(
        num_layers=2,
        page_size=16,
        num_kv_heads=4,
        stored_head_dim=4,
        dtype="bfloat16",
        sliding_window=32,
    ),
)


def page_programs(
    geometries: tuple[CacheGeometry, ...],
    num_pages: tuple[int, ...],
    num_slots: int,
    sharder: Sharder,
) -> ProgramTable:
    """A table in which only the programs that move pages are compiled."""
    buckets = BucketTable((2,), (16,))
    builder = BatchBuilder(
        buckets,
        max_num_seqs=2,
        page_size=16,
        num_pages=num_pages,
        max_pages_per_seq=4,
        vocab_size=8,
        num_host_pages=num_slots,
    )
    shapes = ProgramShapes(
        leaves=[],
        cache=abstract_cache(geometries, num_pages, sharder),
        state=DeviceState.abstract(
            sharder, max_num_seqs=2, max_pages=4, num_groups=len(geometries)
        ),
        hidden_size=8,
        hidden_dtype="float32",
    )
    table = ProgramTable(FUNCTIONS, shapes, sharder, builder, buckets)
    keys = tuple(key for key in table.keys() if key[0] in ("offload", "fetch"))
    with mock.patch.object(table, "keys", lambda: keys):
        table.compile_all(num_threads=1)
    return table


def bits(array: Any) -> np.ndarray:
    """The array's bytes as unsigned integers, so that NaN equals itself."""
    found = np.asarray(array)
    return found.view(f"uint{8 * found.itemsize}")


def _step(cache: KVCache, number: jax.Array) -> KVCache:
    """Stands for a step: changes every value of every page."""

    def change(pages: jax.Array) -> jax.Array:
        kind = jnp.dtype(f"uint{8 * pages.dtype.itemsize}")
        raw = jax.lax.bitcast_convert_type(pages, kind) * 3 + number.astype(kind)
        return jax.lax.bitcast_convert_type(raw, pages.dtype)

    return jax.tree.map(change, cache)


class MoverRun:
    """A mover on the real thing, and what cache and slots should hold.

    Attributes:
      cache: on the devices.
      expected: for each group the bits of keys and values, [2, L, P, B, K, H].
      slots: for each group the bits of the pages in the host's slots that were filled, each
        [2, L, B, K, H].
    """

    def __init__(
        self,
        geometries: tuple[CacheGeometry, ...],
        num_pages: tuple[int, ...],
        num_slots: int,
        *,
        num_devices: int = 1,
    ):
        sharder = Sharder(make_mesh(num_devices))
        self.programs = page_programs(geometries, num_pages, num_slots, sharder)
        self.num_pages, self.num_slots = num_pages, num_slots
        self.host_pages = HostPages(geometries, num_slots)
        self.mover = PageMover(self.programs, self.host_pages)
        self.cache = allocate_cache(geometries, num_pages, sharder)
        rng = np.random.default_rng(0)

        def fill(leaf: jax.Array) -> jax.Array:
            raw = rng.integers(0, 256, leaf.nbytes, np.uint8).view(leaf.dtype).reshape(leaf.shape)
            return jax.device_put(raw, leaf.sharding)

        self.cache = jax.tree.map(fill, self.cache)
        self.expected = [np.stack([bits(g.k_pages), bits(g.v_pages)]) for g in self.cache.groups]
        self.slots: list[dict[int, np.ndarray]] = [{} for _ in geometries]
        self._step = jax.jit(_step, donate_argnums=0).lower(self.cache, np.int32(0)).compile()

    def apply(self, offloads: Sequence[PageMove] = (), fetches: Sequence[PageMove] = ()) -> None:
        """Move pages, on the devices and in the model."""
        self.cache = self.mover.apply(offloads, fetches, self.cache)
        for move in offloads:
            page = self.expected[move.group][:, :, move.page]
            self.slots[move.group][move.host_slot] = page.copy()
        for move in fetches:
            page = self.slots[move.group][move.host_slot]
            self.expected[move.group][:, :, move.page] = page

    def step(self, number: int) -> None:
        """Overwrite all pages in place, right behind the moves."""
        self.cache = self._step(self.cache, np.int32(number))
        for pages in self.expected:
            pages[...] = pages * pages.dtype.type(3) + pages.dtype.type(number)

    def check(self) -> None:
        """Cache and slots hold what they should, bit for bit; the null page may hold anything."""
        self.mover.land_all()
        for group, (cached, slots) in enumerate(zip(self.cache.groups, self.slots, strict=True)):
            found = np.stack([bits(cached.k_pages), bits(cached.v_pages)])
            np.testing.assert_array_equal(found[:, :, 1:], self.expected[group][:, :, 1:])
            for slot, page in slots.items():
                np.testing.assert_array_equal(self.on_host(group, slot), page)

    def on_host(self, group: int, slot: int) -> np.ndarray:
        """The bits of a slot, [2, L, B, K, H]."""
        (page,) = self.host_pages.get(group, [slot])
        assert page.sharding.memory_kind == HOST_MEMORY
        return bits(page)

    def run_randomly(self, num_steps: int, seed: int) -> tuple[int, int]:
        """Random moves, each followed by a step that overwrites all pages; checked in the end.

        Returns:
          Offloaded and fetched bytes, which the mover should have counted.
        """
        rng = np.random.default_rng(seed)
        num_bytes = [0, 0]
        for number in range(num_steps):
            offloads, fetches = [], []
            for group, num_pages in enumerate(self.num_pages):
                count = int(rng.choice([0, 1, 7, 30, 64, self.num_slots]))
                count = min(count, self.num_slots, num_pages - 1)
                pages = rng.permutation(np.arange(1, num_pages))[:count].tolist()
                slots = rng.permutation(self.num_slots)[:count].tolist()
                offloads += moves_of(group, pages, slots)
                known = sorted({*self.slots[group], *slots})
                if not known:
                    continue
                count = int(rng.choice([0, 0, 1, 9, 40, 70]))
                pages = rng.permutation(np.arange(1, num_pages))[:count].tolist()
                fetches += moves_of(group, pages, rng.choice(known, len(pages)).tolist())
            self.apply(offloads, fetches)
            for index, moves in enumerate((offloads, fetches)):
                num_bytes[index] += sum(self.host_pages.bytes_per_page(m.group) for m in moves)
            self.step(number)
        self.check()
        return num_bytes[0], num_bytes[1]


def moves_of(group: int, pages: Sequence[int], slots: Sequence[int]) -> list[PageMove]:
    """A move for each pair of page and slot."""
    pairs = zip(pages, slots, strict=True)
    return [PageMove(group=group, page=page, host_slot=slot) for page, slot in pairs]
