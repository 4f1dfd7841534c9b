"""Static numbers of the greedy head's kernel: its tiles, and which thread block makes them."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

BLOCK_K = 64  # of a ring step
GROUP_ROWS = 64  # of hidden states, of one WGMMA
COMPUTING = 2  # warpgroups
ROW_TILES = (128, 64)
COLUMN_TILES = (256, 192, 128)

_RING_BYTES = 224 * 1024  # of shared memory's 227 KiB


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyHeadTuning:
    """Sizes of the kernel.

    Attributes:
      stages: ring steps in flight, at least 2, since a step is done only when the next one has
        come; fewer where shared memory does not hold them.
      row_tile: rows of a tile, 128 or 64; None = 64 if that holds all rows, else 128.
      columns: of a tile, 256, 192 or 128; None = as few columns for each thread block as can be.
      programs: thread blocks, about one a multiprocessor.
    """

    stages: int = 8
    row_tile: int | None = None
    columns: int | None = None
    programs: int = 132

    def __post_init__(self):
        """Refuse what would never begin, and tiles that are not there."""
        if self.stages < 2 or self.programs < 1:
            raise ValueError(
                f"stages must be at least 2, and programs 1; got {self.stages} and {self.programs}"
            )
        if self.row_tile not in (None, *ROW_TILES):
            raise ValueError(f"row_tile must be one of {ROW_TILES}; got {self.row_tile}")
        if self.columns not in (None, *COLUMN_TILES):
            raise ValueError(f"columns must be one of {COLUMN_TILES}; got {self.columns}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyHeadPlan:
    """Static numbers of one kernel: padded rows S, D, V, and how it is done."""

    rows: int
    depth: int
    vocabulary: int
    dtype: Any
    tuning: GreedyHeadTuning

    def __post_init__(self):
        """Refuse a tile that the vocabulary does not hold."""
        if self.columns > self.vocabulary:
            raise ValueError(f"V must be at least {self.columns}; got {self.vocabulary}")

    @property
    def steps(self) -> int:
        """Ring steps of a tile."""
        return self.depth // BLOCK_K

    @property
    def row_tile(self) -> int:
        """Rows of a tile, those that are padded included."""
        if self.tuning.row_tile is not None:
            return self.tuning.row_tile
        return min(ROW_TILES) if self.rows <= min(ROW_TILES) else max(ROW_TILES)

    @property
    def tile_rows(self) -> int:
        """Rows of hidden states in a tile: all that a tile takes, unless there are fewer."""
        return min(self.rows, self.row_tile)

    @property
    def row_tiles(self) -> int:
        """Of hidden states; the last one overlaps its neighbour."""
        return -(-self.rows // self.row_tile)

    @property
    def stored_rows(self) -> int:
        """Rows of the output, which hold whole tiles."""
        return max(self.rows, self.row_tile)

    @property
    def column_parts(self) -> int:
        """Parts of a tile's columns: computing warpgroups that lie side by side."""
        return COMPUTING * GROUP_ROWS // self.row_tile

    @property
    def columns(self) -> int:
        """Columns of a tile."""
        if self.tuning.columns is not None:
            return self.tuning.columns
        fitting = [columns for columns in COLUMN_TILES if columns <= self.vocabulary]
        return min(fitting, key=self._columns_of_a_program)

    @property
    def own_columns(self) -> int:
        """Columns of a computing warpgroup."""
        return self.columns // self.column_parts

    @property
    def column_tiles(self) -> int:
        """Of the head; the last one overlaps its neighbour."""
        return -(-self.vocabulary // self.columns)

    @property
    def sharers(self) -> int:
        """Thread blocks that share the columns of a tile of rows."""
        return min(self.column_tiles, self._sharers_at_most)

    @property
    def programs(self) -> int:
        """Thread blocks."""
        return self.sharers * self.row_tiles

    @property
    def partials(self) -> int:
        """Best logits of a row that the kernel leaves, P."""
        return self.sharers * self.column_parts

    @property
    def stages(self) -> int:
        """Ring steps in flight."""
        step_bytes = (self.row_tile + self.columns) * BLOCK_K * jnp.dtype(self.dtype).itemsize
        return min(self.tuning.stages, _RING_BYTES // step_bytes)

    @property
    def _sharers_at_most(self) -> int:
        return max(1, self.tuning.programs // self.row_tiles)

    def _columns_of_a_program(self, columns: int) -> int:
        """That the busiest thread block computes, by tiles of so many columns."""
        column_tiles = -(-self.vocabulary // columns)
        return -(-column_tiles // self._sharers_at_most) * columns
