"""Who reads what of a weight in the skinny product: equal shares of tiles and ring steps."""

import functools
from dataclasses import dataclass
from typing import Literal

from pallas_kernels.products.product_tuning import ProductTuningConfig

TILE_COLUMNS = 64  # weight columns of one WGMMA
_MIN_STAGES = 4  # while one is consumed, the others are in flight
_SMEM_BYTES = 232_448 - 4_096  # of one thread block on Hopper, less barriers and alignment
# What L2 gives the processors in the time in which the memory gives one byte.
_L2_BYTES_PER_BYTE = 1.3
# Rows of 128 bytes, far apart, come a little slower from the memory than longer ones.
_SHORT_ROW_PENALTY = 1.05

Kept = Literal["nothing", "share", "all"]
"""What of x stays in shared memory: nothing (it comes with the weights), what a program's share
needs, or all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductSchedule:
    """Static numbers of one product.

    The weight is cut into `tiles` of `block_n` columns and each tile into `steps` of `block_k`
    rows. Step s of tile t is number `t * steps + s`; program p takes the numbers
    `[p * share, (p + 1) * share)`. The sums of a tile that several programs share stand in as
    many planes of the output, in the order of the programs.

    Attributes:
      block_n: weight columns a tile.
      block_k: rows of K a step.
      tiles: number of tiles; the last one overlaps its neighbour where block_n does not divide N.
      steps: number of steps of a tile.
      share: steps of a program.
      partials: planes of the output, P.
      stages: steps in flight.
      kept_steps: steps of x that stay in shared memory; 0 = x comes with the weights.
    """

    block_n: int
    block_k: int
    tiles: int
    steps: int
    share: int
    partials: int
    stages: int
    kept_steps: int = 0

    @property
    def programs(self) -> int:
        """Programs that have work; only the last one may have less than a share."""
        return -(-self.tiles * self.steps // self.share)

    @property
    def warpgroups(self) -> int:
        """Computing warpgroups, which share the columns of a tile."""
        return min(2, self.block_n // TILE_COLUMNS)

    @property
    def fills_all_planes(self) -> bool:
        """Every tile is shared by exactly `partials` programs, so that no plane needs zeros."""
        return min(_sharers(self.tiles, self.steps, self.share)) == self.partials


def _sharers(tiles: int, steps: int, share: int) -> list[int]:
    """Number of programs that work on each tile."""
    firsts = range(0, tiles * steps, steps)
    return [(first + steps - 1) // share - first // share + 1 for first in firsts]


@functools.cache
def make_schedule(
    rows: int,
    depth: int,
    columns: int,
    transposed: bool,
    tuning: ProductTuningConfig,
    kept: Kept = "nothing",
) -> ProductSchedule:
    """Choose tile, share and ring of x [rows, depth] times a weight of `columns` columns.

    Of the allowed schedules the one with the least cost: bytes through the slowest place on the
    way, and the partial sums, which are written and read again.

    Args:
      rows: at most 128; those of a WGMMA are a multiple of 8.
      depth: K, a multiple of 64.
      columns: N, a multiple of 64.
      transposed: the weight is stored [N, K].
      tuning: limits and sizes.
      kept: what of x stays in shared memory.

    Returns:
      The schedule.

    Raises:
      ValueError: no tile of `tuning` fits.
    """
    rows += -rows % 8
    ring_rows = rows if kept == "nothing" else 0
    max_partials = tuning.max_partials
    best: tuple[float, ProductSchedule] | None = None
    for block_n in (64, 128, 256) if tuning.block_n is None else (tuning.block_n,):
        is_ragged = columns % block_n != 0
        if block_n > columns or (is_ragged and max_partials != 1):
            continue
        block_k = _choose_block_k(ring_rows, rows * depth * 2, depth, block_n, tuning, kept)
        step_bytes = (block_n + ring_rows) * block_k * 2
        tiles, steps = -(-columns // block_n), depth // block_k
        for share in _shares(tiles, steps, block_n * block_k * 2, max_partials, tuning):
            partials = max(_sharers(tiles, steps, share))
            kept_steps = {"nothing": 0, "share": min(share, steps), "all": steps}[kept]
            kept_bytes = kept_steps * rows * block_k * 2
            stages = _ring_bytes(ring_rows, kept_bytes, block_n, tuning) // step_bytes
            if stages < _MIN_STAGES or (max_partials is not None and partials > max_partials):
                continue
            schedule = ProductSchedule(
                block_n=block_n,
                block_k=block_k,
                tiles=tiles,
                steps=steps,
                share=share,
                partials=partials,
                stages=min(stages, share),
                kept_steps=kept_steps,
            )
            cost = _cost(schedule, rows, transposed, tuning)
            if best is None or cost < best[0]:
                best = cost, schedule
    if best is None:
        raise ValueError(
            "block_n must divide the columns and fit ring_kib; "
            f"got {tuning.block_n} for {columns} columns, {rows} rows and {tuning.ring_kib} KiB"
        )
    return best[1]


def _ring_bytes(ring_rows: int, kept_bytes: int, block_n: int, tuning: ProductTuningConfig) -> int:
    """Room for steps in flight, beside x and the staged output [rows, 64] of each warpgroup."""
    staged = min(2, block_n // TILE_COLUMNS) * ring_rows * TILE_COLUMNS * 4
    return min(tuning.ring_kib * 1024, _SMEM_BYTES - staged - kept_bytes)


def _choose_block_k(
    ring_rows: int,
    x_bytes: int,
    depth: int,
    block_n: int,
    tuning: ProductTuningConfig,
    kept: Kept,
) -> int:
    """The largest depth of a step that divides K, and of which enough fit."""
    ring = _ring_bytes(ring_rows, x_bytes if kept == "all" else 0, block_n, tuning)
    most = ring // ((block_n + ring_rows) * 2)  # of K in flight
    block_k = tuning.block_k
    while block_k > 64 and (depth % block_k or most // block_k < _MIN_STAGES):
        block_k //= 2
    return block_k


def _shares(
    tiles: int, steps: int, step_bytes: int, max_partials: int | None, tuning: ProductTuningConfig
) -> list[int]:
    """Shares worth a look: the least that is allowed, a third more, and whole tiles."""
    whole_tiles = -(-tiles // tuning.num_processors) * steps
    if max_partials == 1:
        return [whole_tiles]
    least = max(
        -(-tiles * steps // tuning.num_processors),
        min(steps, -(-tuning.min_share_kib * 1024 // step_bytes)),
    )
    if max_partials is not None:  # so long a share is surely in few pieces
        least_for_partials = -(-(steps - 1) // (max_partials - 1))
        return sorted({*range(least, max(least, least_for_partials) + 1), whole_tiles})
    return sorted({*range(least, least + least // 3 + 2), whole_tiles})


def _cost(
    schedule: ProductSchedule, rows: int, transposed: bool, tuning: ProductTuningConfig
) -> float:
    """Time in bytes from memory: the slowest way of weights and activations, then the sums."""
    step_bytes = schedule.block_n * schedule.block_k * 2
    ring_rows = 0 if schedule.kept_steps else rows
    both_bytes = (schedule.block_n + ring_rows) * schedule.block_k * 2
    all_steps = schedule.tiles * schedule.steps
    is_short_row = not transposed and schedule.block_n == 64
    from_memory = all_steps * step_bytes * (_SHORT_ROW_PENALTY if is_short_row else 1)
    from_l2 = all_steps * both_bytes / _L2_BYTES_PER_BYTE
    busiest = schedule.share * both_bytes * tuning.enough_programs
    sums = schedule.partials * rows * schedule.tiles * schedule.block_n * 4
    return max(from_memory, from_l2, busiest) + 2 * sums
