"""Passes of the sampling kernel over a row, and how its warpgroups tell each other sums."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sampling.sampling_inputs import MAX_VOCABULARY
from pallas_kernels.sampling.sampling_noise import gumbel_noise

LINE = 128  # logits that a warp holds, 4 a thread
BLOCK_LINES = 4  # a line for each warp of a warpgroup
LIST_DEPTH = 4  # highest logits that each of the 512 lanes of a warpgroup remembers
LOWEST = float(jnp.finfo(jnp.float32).min)

# A warp for each line and 4 neighbours a thread: one load of 16 bytes, and sums over a line
# need no shared memory.
LINES = plgpu.Layout.TILED(
    plgpu.Tiling(((BLOCK_LINES, LINE), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)

Block = tuple[jax.Array, jax.Array]
"""x float32[4, 128], and the index of each in its row, int32[4, 128]."""
Fold = Callable[[Callable[[Any, list[Block]], Any], Any], Any]
"""fold(step, start): `state = step(state, blocks)` over all blocks that this warpgroup has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTuningConfig:
    """Sizes of the sampling kernel.

    Attributes:
      warpgroups: of a thread block, at most 8.
      tile_lines: lines of 128 logits a tile, a multiple of 4.
      num_stages: tiles in flight for each warpgroup; `warpgroups * num_stages` is at most 32.
    """

    warpgroups: int
    tile_lines: int = 16
    num_stages: int = 6


class Row(NamedTuple):
    """One row: its logits [lines, 128] in global memory, and its parameters, all scalars.

    x stands for a logit times `scale`: the logarithm in base 2 of a weight.
    """

    logits: Any
    first_word: jax.Array
    second_word: jax.Array
    top_k: jax.Array
    scale: jax.Array
    noise_scale: jax.Array
    top_p: jax.Array
    log2_min_p: jax.Array

    def score(self, x: jax.Array, index: jax.Array) -> jax.Array:
        """Noise added to x."""
        return x + gumbel_noise(index, self.first_word, self.second_word) * self.noise_scale

    def value(self, token: jax.Array) -> jax.Array:
        """The x of a token."""
        line = lax.div(token, jnp.int32(LINE))
        return self.logits[line, token - line * LINE] * self.scale


class Shared(NamedTuple):
    """Shared memory: the warpgroups' tiles, and what they tell each other."""

    tiles: Any
    full: Any
    told: Any
    all_told: Any


def shared_memory(tuning: SamplingTuningConfig) -> Shared:
    """The scratch of one thread block."""
    num_tiles = tuning.warpgroups * tuning.num_stages
    return Shared(
        tiles=plgpu.SMEM((num_tiles, tuning.tile_lines, LINE), jnp.float32),
        full=plgpu.Barrier(num_barriers=num_tiles),
        told=plgpu.SMEM((2, tuning.warpgroups * BLOCK_LINES), jnp.float32),
        all_told=plgpu.Barrier(num_arrivals=tuning.warpgroups),
    )


class Source(NamedTuple):
    """Where the blocks of a row come from, and what gathers the sums of its warpgroups.

    Every method is called by all warpgroups of the row, and gives each the same scalars.
    """

    row: Row
    fold: Fold
    gather: Callable[[list[jax.Array]], list[list[jax.Array]]]

    def survey(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Token of the best score, highest x, and sum of the weights 2^(x - highest)."""
        start = (_no_best(), full(LOWEST), full(0.0))
        best, peak, total = self.fold(functools.partial(_survey, self.row), start)
        of_line = peak.max(axis=1)
        total = total * jnp.exp2(peak - spread(of_line))
        peaks, totals = self.gather([of_line, total.sum(axis=1)])
        peak = functools.reduce(jnp.maximum, peaks)
        weights = [t * jnp.exp2(p - peak) for p, t in zip(peaks, totals, strict=True)]
        return self._argmax(best), peak, functools.reduce(jnp.add, weights)

    def draw(self, pivot: jax.Array, floor: jax.Array) -> jax.Array:
        """Token of the best score of x > pivot and >= floor."""
        pick = functools.partial(_pick, self.row, pivot, floor)
        return self._argmax(self.fold(pick, _no_best()))

    def weigh(self, x: jax.Array, floor: jax.Array, peak: jax.Array) -> list[jax.Array]:
        """Sums of the weights above x, and of those from the floor on, of the latter."""
        sums = self.fold(functools.partial(_weigh, x, floor, peak), (full(0.0), full(0.0)))
        told = self.gather([part.sum(axis=1) for part in sums])
        return [functools.reduce(jnp.add, values) for values in told]

    def count_where(self, is_counted: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """int32: how many x are counted."""

        def step(total, blocks):
            return sum((jnp.where(is_counted(x), 1.0, 0.0) for x, _ in blocks), total)

        (told,) = self.gather([self.fold(step, full(0.0)).sum(axis=1)])
        return functools.reduce(jnp.add, told).astype(jnp.int32)

    def remember(self) -> tuple[list[Block], jax.Array]:
        """The highest x of each lane with their indices, and how many lanes saw NaN."""
        lists, nans = self.fold(_remember, ([_no_best() for _ in range(LIST_DEPTH)], full(0.0)))
        (told,) = self.gather([nans.sum(axis=1)])
        return lists, functools.reduce(jnp.add, told)

    def highest(self, values: jax.Array) -> jax.Array:
        """The highest of all lanes' float32[4, 128]."""
        (told,) = self.gather([values.max(axis=1)])
        return functools.reduce(jnp.maximum, told)

    def _argmax(self, best: Block) -> jax.Array:
        """The token of the highest score, the first one of equals."""
        score, token = best
        highest = score.max(axis=1)
        tokens = jnp.where(
            score == spread(highest), token.astype(jnp.float32), float(MAX_VOCABULARY)
        )
        scores, firsts = self.gather([highest, tokens.min(axis=1)])
        score, token = scores[0], firsts[0]
        for other, index in zip(scores[1:], firsts[1:], strict=True):
            is_better = (other > score) | ((other == score) & (index < token))
            score = jnp.where(is_better, other, score)
            token = jnp.where(is_better, index, token)
        return token.astype(jnp.int32)


def row_source(tuning: SamplingTuningConfig, shared: Shared, row: Row) -> Source:
    """All blocks of a row, from global memory."""
    return Source(
        row,
        functools.partial(_fold_row, tuning, shared, row),
        functools.partial(_gather, tuning, shared),
    )


def full(value: float | int) -> jax.Array:
    """[4, 128] of one value, float32 or int32."""
    dtype = jnp.float32 if isinstance(value, float) else jnp.int32
    return plgpu.layout_cast(jnp.full((BLOCK_LINES, LINE), value, dtype), LINES)


def _fold_row(tuning: SamplingTuningConfig, shared: Shared, row: Row, step, start):
    """Step over this warpgroup's tiles of the row; the last tile begins where it still fits."""
    stages, lines = tuning.num_stages, tuning.tile_lines
    warpgroups, wg = tuning.warpgroups, lax.axis_index("wg")
    num_lines = row.logits.shape[0]
    num_tiles = -(-num_lines // lines)
    steps = lax.div(num_tiles - wg + (warpgroups - 1), jnp.int32(warpgroups))
    line, column = (
        plgpu.broadcasted_iota(jnp.int32, (BLOCK_LINES, LINE), axis, layout=LINES)
        for axis in (0, 1)
    )
    offset = line * LINE + column

    def begin_of(tile):
        first = (wg + tile * warpgroups) * lines
        return first, jnp.minimum(first, num_lines - lines)

    def place(tile):
        return wg * stages + lax.rem(tile, jnp.int32(stages))

    def fetch(tile):
        source, slot = row.logits.at[pl.ds(begin_of(tile)[1], lines)], place(tile)
        # It waits for all threads of the warpgroup: they have read what was there before.
        plgpu.copy_gmem_to_smem(source, shared.tiles.at[slot], shared.full.at[slot])

    def use(tile, state):
        slot, (first, begin) = place(tile), begin_of(tile)
        plgpu.barrier_wait(shared.full.at[slot])
        blocks = []
        for block in range(0, lines, BLOCK_LINES):
            loaded = shared.tiles.at[slot, pl.ds(block, BLOCK_LINES)]
            x = plgpu.load(loaded, layout=LINES) * row.scale
            is_new = line >= first - begin - block  # not of the tile before
            blocks.append((jnp.where(is_new, x, -jnp.inf), offset + (begin + block) * LINE))
        state = step(state, blocks)

        @pl.when(tile + stages < steps)
        def _fetch_next():
            fetch(tile + stages)

        return state

    @pl.loop(0, jnp.minimum(steps, stages))
    def _fetch_first(tile):
        fetch(tile)

    return lax.fori_loop(0, steps, use, start)


def _gather(
    tuning: SamplingTuningConfig, shared: Shared, values: list[jax.Array]
) -> list[list[jax.Array]]:
    """Tell all warpgroups of the row float32[4] values; for each of them, the scalars of all."""
    place = pl.ds(lax.axis_index("wg") * BLOCK_LINES, BLOCK_LINES)
    for number, value in enumerate(values):
        shared.told[number, place] = value
    plgpu.barrier_arrive(shared.all_told)
    plgpu.barrier_wait(shared.all_told)
    told = [
        [shared.told[number, line] for line in range(tuning.warpgroups * BLOCK_LINES)]
        for number in range(len(values))
    ]
    plgpu.commit_smem()  # all threads of the warpgroup have read, before it says so
    plgpu.barrier_arrive(shared.all_told)
    plgpu.barrier_wait(shared.all_told)
    return told


def _survey(row: Row, state, blocks: list[Block]):
    best, peak, total = state
    best = _pick(row, None, None, best, blocks)
    higher = functools.reduce(jnp.maximum, [x for x, _ in blocks], peak)
    total = total * jnp.exp2(peak - higher)
    return best, higher, sum((jnp.exp2(x - higher) for x, _ in blocks), total)


def _pick(row: Row, pivot, floor, best: Block, blocks: list[Block]) -> Block:
    for x, index in blocks:
        score = row.score(x, index)
        is_better = score > best[0]
        if pivot is not None:
            is_better &= (x > pivot) & (x >= floor)
        best = _where(is_better, (score, index), best)
    return best


def _weigh(value, floor, peak, state, blocks: list[Block]):
    above, kept = state
    for x, _ in blocks:
        weight = jnp.where(x >= floor, jnp.exp2(x - peak), 0.0)
        above += jnp.where(x > value, weight, 0.0)
        kept += weight
    return above, kept


def _remember(state, blocks: list[Block]):
    lists, nans = state
    for block in blocks:
        x, _ = block
        nans = jnp.where(x == x, nans, 1.0)
        is_higher = [x > kept for kept, _ in lists]
        inserted = [_where(here, block, kept) for here, kept in zip(is_higher, lists, strict=True)]
        moved = [
            _where(is_higher[place], lists[place], inserted[place + 1])
            for place in range(LIST_DEPTH - 1)
        ]
        lists = [inserted[0], *moved]
    return lists, nans


def _where(condition: jax.Array, yes: Block, no: Block) -> Block:
    return jnp.where(condition, yes[0], no[0]), jnp.where(condition, yes[1], no[1])


def _no_best() -> Block:
    return full(-jnp.inf), full(0)


def spread(of_line: jax.Array) -> jax.Array:
    """[4, 128] of the [4] values of lines."""
    return plgpu.layout_cast(lax.broadcast_in_dim(of_line, (BLOCK_LINES, LINE), [0]), LINES)
