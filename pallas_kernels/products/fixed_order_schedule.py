"""Sizes of the fixed-order product: its chunks follow from the weight, its tiles from the rows."""

import functools
import itertools
from dataclasses import dataclass

BLOCK_K = 64  # of a ring step
WGMMA_COLUMNS = 64  # weight columns of one WGMMA
ROW_TILE = 128  # rows of x of one WGMMA, always; the results of those that are missing are dropped
MAX_CHUNKS = 8
STAGED_BYTES = 8192  # of the output, for each computing warpgroup

_MIN_CHUNK_STEPS = 4
_ENOUGH_PROGRAMS = 128  # of few rows: so many chunks of tiles keep the memory busy
_MAX_SPLIT_ROWS = 1024  # planes of more rows would take too much memory
_NUM_PROCESSORS = 132
_SMEM_BYTES = 232_448 - 4_096  # of one thread block on Hopper, less barriers and alignment
_ROWS_OF_A_GROUP = 8  # row tiles that are computed side by side, so that L2 holds their weights

# Clock cycles of a processor, and bytes in one of them: estimates that choose tiles, nothing more.
_WGMMA_CYCLES = 256  # of a ring step
_ITEM_CYCLES = 3000  # to fill and to drain
_L2_BYTES, _ONE_PROCESSORS_BYTES, _MEMORY_BYTES = 3500, 50, 2500


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedOrderSchedule:
    """Static numbers of one product. Only `chunk_steps` and `chunks` bear on the result's bits.

    Attributes:
      steps: ring steps of K.
      chunk_steps: steps of a chunk; the last one may have less.
      chunks: of K, P.
      splits_chunks: an item is one chunk of a tile, and the result has P planes; otherwise an item
        is a whole tile, whose chunks are added up in registers.
      row_tiles: of ROW_TILE rows; the last one overlaps its neighbour.
      column_tiles: likewise.
      warpgroups: that compute, side by side along the columns.
      group_columns: weight columns of each.
      stages: ring steps in flight.
    """

    steps: int
    chunk_steps: int
    chunks: int
    splits_chunks: bool
    row_tiles: int
    column_tiles: int
    warpgroups: int
    group_columns: int
    stages: int

    @property
    def tile_columns(self) -> int:
        """Weight columns of a tile."""
        return self.warpgroups * self.group_columns

    @property
    def items(self) -> int:
        """Pieces of work, which the programs share."""
        return self.row_tiles * self.column_tiles * (self.chunks if self.splits_chunks else 1)

    @property
    def programs(self) -> int:
        """Thread blocks, one a multiprocessor."""
        return min(self.items, _NUM_PROCESSORS)

    @property
    def row_group(self) -> int:
        """Row tiles that are computed side by side."""
        return min(_ROWS_OF_A_GROUP, self.row_tiles)


def count_chunks(depth: int, columns: int) -> tuple[int, int]:
    """Chunks of a weight of K = `depth`, and ring steps of each; whoever multiplies by it.

    So many that few rows, too, find work for all multiprocessors.
    """
    steps = depth // BLOCK_K
    wanted = round(_ENOUGH_PROGRAMS / (columns // WGMMA_COLUMNS))
    wanted = max(1, min(wanted, MAX_CHUNKS, steps // _MIN_CHUNK_STEPS))
    chunk_steps = -(-steps // wanted)
    return -(-steps // chunk_steps), chunk_steps


@functools.cache
def make_fixed_order_schedule(rows: int, depth: int, columns: int) -> FixedOrderSchedule:
    """The schedule that should cost least, for x [rows, depth] times a weight of `columns`.

    Args:
      rows: padded, a multiple of 8.
      depth: K, a multiple of 64.
      columns: N, a multiple of 64.
    """
    chunks, chunk_steps = count_chunks(depth, columns)
    groups = [(1, 64), (2, 64), (3, 64), (2, 128)]
    candidates = []
    for (warpgroups, group_columns), splits in itertools.product(groups, (True, False)):
        if splits and (chunks == 1 or rows > _MAX_SPLIT_ROWS):
            continue
        # Two sets of sums, of the chunk and of all, must fit the registers of a thread.
        has_room = splits or chunks == 1 or group_columns == WGMMA_COLUMNS
        if warpgroups * group_columns > columns or not has_room:
            continue
        step_bytes = (warpgroups * group_columns + ROW_TILE) * BLOCK_K * 2
        room = _SMEM_BYTES - warpgroups * STAGED_BYTES
        candidates.append(
            FixedOrderSchedule(
                steps=depth // BLOCK_K,
                chunk_steps=chunk_steps,
                chunks=chunks,
                splits_chunks=splits,
                row_tiles=-(-rows // ROW_TILE),
                column_tiles=-(-columns // (warpgroups * group_columns)),
                warpgroups=warpgroups,
                group_columns=group_columns,
                stages=min(room // step_bytes, 8),
            )
        )
    return min(candidates, key=lambda schedule: _cost(schedule, rows))


def _cost(schedule: FixedOrderSchedule, rows: int) -> float:
    """Cycles: the slowest of tensor cores, L2 and memory; then the planes' way and back."""
    columns, tile_rows = schedule.tile_columns, min(rows, ROW_TILE)
    steps = schedule.chunk_steps if schedule.splits_chunks else schedule.steps
    item_bytes = steps * (columns + tile_rows) * BLOCK_K * 2
    compute = steps * _WGMMA_CYCLES * columns // WGMMA_COLUMNS
    item = _ITEM_CYCLES + max(compute, item_bytes / _ONE_PROCESSORS_BYTES)
    rounds = -(-schedule.items // schedule.programs)
    weight_bytes = schedule.steps * BLOCK_K * 2 * schedule.column_tiles * columns
    planes = schedule.chunks if schedule.splits_chunks else 1
    out_bytes = 2 * planes * rows * schedule.column_tiles * columns * 4
    return (
        max(
            rounds * item,
            schedule.items * item_bytes / _L2_BYTES,
            weight_bytes / _MEMORY_BYTES,
        )
        + out_bytes / _MEMORY_BYTES
    )
