"""PackedLayout: where each input of a step stands in the one int32 buffer that is uploaded."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.execution.buckets import Bucket
from jaxserve.execution.slot_record import RECORD_SIZE

MAX_IN_STEP_ADMISSIONS = 32
NUM_PAGE_COPIES = 16
"""Pages of each group that one program copies to others; what is left copies page 0 to itself."""


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Capacities of the sections of a packed batch; sections follow in the order of `sections`.

    Attributes:
      num_rows: S.
      num_tokens: T, or 0 when no token id is sent (pure decode).
      num_groups: cache groups.
      num_page_updates: for each group, entries (state slot, index in page table, page).
      num_admissions: entries (state slot, record of the slot).
      num_steps: W, decode steps that the program runs.
      table_pages: the first so many entries of a page table are read; 0 = all.
    """

    num_rows: int
    num_tokens: int
    num_groups: int
    num_page_updates: int
    num_admissions: int
    num_steps: int = 1
    table_pages: int = 0

    @property
    def sections(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape. `counts` holds the number of rows and of decode rows."""
        return {
            "counts": (2,),
            "slot_ids": (self.num_rows,),
            "num_scheduled": (self.num_rows,),
            "page_updates": (self.num_groups, self.num_page_updates, 3),
            "token_ids": (self.num_tokens,),
            "admitted_slots": (self.num_admissions,),
            "admitted_records": (self.num_admissions, RECORD_SIZE),
        }

    @property
    def size(self) -> int:
        """int32 values in the buffer."""
        return sum(math.prod(shape) for shape in self.sections.values())

    def split(self, packed: Any) -> dict[str, Any]:
        """Views of the sections of a numpy buffer, or slices of a traced one."""
        return {
            name: packed[start:stop].reshape(shape)
            for name, start, stop, shape in _section_bounds(self)
        }

    def empty(self, unused_slot: int) -> np.ndarray:
        """A buffer whose row, page and admission entries all point at no slot."""
        return _empty_buffer(self, unused_slot).copy()


@functools.cache
def _section_bounds(layout: PackedLayout) -> tuple[tuple[str, int, int, tuple[int, ...]], ...]:
    """(name, start, stop, shape) of each section; asked for in every step."""
    bounds, start = [], 0
    for name, shape in layout.sections.items():
        stop = start + math.prod(shape)
        bounds.append((name, start, stop, shape))
        start = stop
    return tuple(bounds)


@functools.cache
def _empty_buffer(layout: PackedLayout, unused_slot: int) -> np.ndarray:
    """What `PackedLayout.empty` copies in every step."""
    packed = np.zeros(layout.size, np.int32)
    views = layout.split(packed)
    for name in ("slot_ids", "admitted_slots"):
        views[name][...] = unused_slot
    views["page_updates"][..., 0] = unused_slot
    packed.setflags(write=False)
    return packed


def step_layout(bucket: Bucket, *, num_groups: int, page_size: int) -> PackedLayout:
    """The layout of a bucket: every page that a step can need fits.

    A row of n tokens receives at most ceil(n / page_size) pages, so all rows together at most
    T / page_size + S. A decode row gets one, since W is at most the page size. What comes with an
    admission from elsewhere goes by `admission_layout`.
    """
    T, S, W = bucket.num_tokens, bucket.num_rows, bucket.num_steps
    if page_size < W:
        raise ValueError(f"steps of a program must be at most {page_size}, a page; got {W}")
    if bucket.is_decode_only:
        return PackedLayout(S, 0, num_groups, S, 0, W, -(-bucket.max_context // page_size))
    return PackedLayout(S, T, num_groups, S + T // page_size, min(S, MAX_IN_STEP_ADMISSIONS))


def admission_layout(*, max_num_seqs: int, num_groups: int) -> PackedLayout:
    """The larger layout of the program that only changes the device state."""
    return PackedLayout(0, 0, num_groups, max(4096, max_num_seqs), max_num_seqs)
