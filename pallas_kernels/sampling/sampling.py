"""Sampling in Pallas Mosaic GPU (Hopper): a few passes over the logits, no sort."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cacheable_kernels import make_kernels_cacheable
from pallas_kernels.sampling.sampling_inputs import from_ordered, middle, row_limits, to_ordered
from pallas_kernels.sampling.sampling_passes import (
    LINE,
    LOWEST,
    Row,
    SamplingTuningConfig,
    Source,
    row_source,
    shared_memory,
)

make_kernels_cacheable()

MAX_ROUNDS = 1000  # draws; each halves the weight that is left, so about 20 are ever needed

COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    reduction_scratch_bytes=0,
)

# Not yet tuned. ptxas gives a thread 128 registers, so one block fits a multiprocessor; the same
# sizes for any number of rows, so that a row's sums do not depend on who shares the batch.
DEFAULT_TUNING = SamplingTuningConfig(warpgroups=4)


@functools.partial(jax.jit, static_argnames=("interpret", "tuning"))
def sample(
    logits: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    *,
    interpret: Any = None,
    tuning: SamplingTuningConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Draw one token a row; a row's token depends on nothing of other rows.

    Kept are the tokens that min-p, then top-k, then top-p leave; ties at a border are kept.
    top-p keeps the fewest most likely tokens whose probabilities, renormalised after min-p and
    top-k, sum to at least `top_p`. The best of all tokens with their noise is drawn; while it is
    none of the kept ones, nothing at or below its logit is, and the best above it is drawn.

    Args:
      logits: float32[S, V]; V that is no multiple of 128 costs a padded copy.
      keys: int32[S, 2], of each row's noise (`sampling_noise.row_keys`).
      temperature: float32[S], 0 = the most likely token, the first one of equals.
      top_k: int32[S], 0 = off; beyond some hundreds it takes a dozen passes.
      top_p: float32[S], 1 = off.
      min_p: float32[S], 0 = off.
      interpret: `plgpu.InterpretGPUParams()` runs the kernel on the CPU.
      tuning: sizes of the kernel; None = the default.

    Returns:
      tokens int32[S], and bool[S]: the row has no NaN, and its highest logit is finite. Other
      rows have any token.

    Raises:
      ValueError: dtype or shapes.

    Source: Gumbel-max (Gumbel 1954); Holtzman et al. 2020 (top-p).
    """
    limits = row_limits(logits, temperature, top_k, top_p, min_p)
    num_rows, vocab_size = logits.shape
    tuning = tuning or DEFAULT_TUNING
    padded = max(-(-vocab_size // LINE), tuning.tile_lines) * LINE
    if padded > vocab_size:
        missing = ((0, 0), (0, padded - vocab_size))
        logits = jnp.pad(logits, missing, constant_values=-jnp.inf)
    words = jnp.concatenate([keys, limits.top_k[:, None]], axis=1)
    numbers = jnp.stack(
        [limits.scale, limits.noise_scale, limits.top_p, limits.log2_min_p], axis=1
    )  # fmt: skip
    run = plgpu.kernel(
        functools.partial(_kernel, tuning),
        out_type=[jax.ShapeDtypeStruct((num_rows,), jnp.int32)] * 2,
        grid=(num_rows,),
        grid_names=("row",),
        num_threads=tuning.warpgroups,
        thread_name="wg",
        compiler_params=COMPILER_PARAMS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    tokens, is_finite = run(logits.reshape(num_rows, -1, LINE), words, numbers)
    return tokens, is_finite > 0


def _kernel(tuning: SamplingTuningConfig, logits_ref, words_ref, numbers_ref, *out_refs: Any):
    """Draw the token of one row."""
    row_index = lax.axis_index("row")
    row = Row(
        logits_ref.at[row_index],
        *(words_ref[row_index, column] for column in range(3)),
        *(numbers_ref[row_index, column] for column in range(4)),
    )
    is_writer = lax.axis_index("wg") == 0

    def write(token, is_finite):
        @pl.when(is_writer)
        def _write():
            out_refs[0][row_index] = token
            out_refs[1][row_index] = is_finite.astype(jnp.int32)

    def run(shared):
        source = row_source(tuning, shared, row)

        @pl.when(row.top_k == 0)
        def _sample_all():
            write(*_sample_all_tokens(source))

        @pl.when(row.top_k > 0)
        def _sample_highest():
            _sample_top_k(source, write)

    pl.run_scoped(run, shared_memory(tuning), collective_axes="wg")


def _sample_all_tokens(source: Source) -> tuple[jax.Array, jax.Array]:
    """Token, and whether the row is finite, of a row without top-k."""
    token, peak, total = source.survey()
    is_finite = (total < jnp.inf) & _is_finite(peak)
    floor = peak + source.row.log2_min_p
    return _draw(source, token, is_finite, peak=peak, floor=floor, total=total), is_finite


def _sample_top_k(source: Source, write) -> None:
    """Draw from the row's k highest.

    Every lane remembers its highest logits. All that are higher than each lane's lowest
    remembered one are then known; where they are k or more, no second pass is needed.
    """
    lists, num_nans = source.remember()
    complete, peak = source.highest(lists[-1][0]), source.highest(lists[0][0])
    is_finite = (num_nans == 0) & _is_finite(peak)
    remembered = source._replace(fold=lambda step, start: step(start, lists))

    def draw_from(source: Source, low, high):
        kth = _kth_highest(source, low, high)
        floor = jnp.maximum(peak + source.row.log2_min_p, kth)
        token = _draw(source, jnp.int32(-1), is_finite, peak=peak, floor=floor, total=jnp.inf)
        write(jnp.maximum(token, 0), is_finite)

    known = remembered.count_where(lambda x: x > complete)
    is_known = (known >= source.row.top_k) | ~is_finite

    @pl.when(is_known)
    def _draw_from_lists():
        draw_from(remembered, complete, to_ordered(peak) + 1)

    @pl.when(~is_known)
    def _draw_from_row():
        draw_from(source, jnp.float32(-jnp.inf), to_ordered(complete) + 1)


def _draw(source: Source, token: jax.Array, is_finite, *, peak, floor, total) -> jax.Array:
    """Draw until a token is kept: each round all that is left is above the one before.

    Args:
      source: of all x >= floor at least.
      token: the first one drawn; -1 = none yet.
      is_finite: draw nothing if not.
      peak: highest x.
      floor: lowest x that min-p and top-k leave.
      total: no less than the sum of the weights of x >= floor.
    """
    top_p = source.row.top_p

    def is_in_nucleus(x):
        above, kept = source.weigh(x, floor, peak)
        return above < top_p * kept

    def check_and_draw(state):
        rounds, token, _ = state
        x = source.row.value(jnp.maximum(token, 0))
        is_candidate = (token >= 0) & (x >= floor)
        # Of a token of more than 1 - top_p: what is above it can only be less than top_p.
        is_sure = (x >= peak) | (jnp.exp2(x - peak) > (1 - top_p) * total)
        is_kept = lax.cond(
            is_candidate & ~is_sure,
            lambda: is_in_nucleus(x).astype(jnp.int32),
            lambda: (is_candidate & is_sure).astype(jnp.int32),
        )
        pivot = jnp.where(token >= 0, x, -jnp.inf)
        token = lax.cond(is_kept == 0, lambda: source.draw(pivot, floor), lambda: token)
        return rounds + 1, token, is_kept

    def goes_on(state):
        rounds, _, is_kept = state
        return (is_kept == 0) & (rounds < MAX_ROUNDS)

    start = (jnp.int32(0), token, jnp.where(is_finite, 0, 1))
    return lax.while_loop(goes_on, check_and_draw, start)[1]


def _kth_highest(source: Source, low: jax.Array, high: jax.Array) -> jax.Array:
    """A threshold that exactly the k highest and their equals reach.

    Args:
      source: of all that are higher than `low`.
      low: float32, the k-th highest is not lower.
      high: ordered int32, fewer than k reach it.
    """
    top_k = source.row.top_k

    def search(state):
        low, high, _ = state
        threshold = middle(low, high)
        lowest = from_ordered(threshold)
        count = source.count_where(lambda x: x >= lowest)
        low = jnp.where(count >= top_k, threshold, low)
        high = jnp.where(count >= top_k, high, threshold)
        return low, high, (count == top_k).astype(jnp.int32)

    def goes_on(state):
        low, high, is_found = state
        return (is_found == 0) & (middle(low, high) > low)

    low, _, _ = lax.while_loop(goes_on, search, (to_ordered(low), high, jnp.int32(0)))
    return from_ordered(low)


def _is_finite(peak: jax.Array) -> jax.Array:
    return (peak < jnp.inf) & (peak > LOWEST)
