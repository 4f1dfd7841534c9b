"""Log-softmax whose rows do not depend on each other, bit for bit, in Pallas Mosaic GPU (Hopper).

XLA cuts the sum over a row as the number of rows suggests.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sampling.sampling import COMPILER_PARAMS, DEFAULT_TUNING
from pallas_kernels.sampling.sampling_inputs import LOG2_E
from pallas_kernels.sampling.sampling_passes import (
    LINE,
    LOWEST,
    Block,
    Row,
    SamplingTuningConfig,
    Source,
    full,
    row_source,
    shared_memory,
    spread,
)


@functools.partial(jax.jit, static_argnames=("interpret", "tuning"))
def log_softmax(
    logits: jax.Array, *, interpret: Any = None, tuning: SamplingTuningConfig | None = None
) -> jax.Array:
    """Log-probabilities of each row, which depend on nothing of other rows.

    Args:
      logits: float32[S, V]; V that is no multiple of 128 costs a padded copy.
      interpret: `plgpu.InterpretGPUParams()` runs the kernel on the CPU.
      tuning: sizes of the kernel; None = the sampler's.

    Returns:
      float32[S, V]; of a row with NaN all are NaN.

    Raises:
      ValueError: dtype or shape.
    """
    if logits.dtype != jnp.float32 or logits.ndim != 2 or not logits.size:
        raise ValueError(f"logits must be float32[S, V]; got {logits.dtype}{list(logits.shape)}")
    num_rows, vocab_size = logits.shape
    tuning = tuning or DEFAULT_TUNING
    padded = max(-(-vocab_size // LINE), tuning.tile_lines) * LINE
    missing = ((0, 0), (0, padded - vocab_size))
    lines = jnp.pad(logits, missing, constant_values=-jnp.inf).reshape(num_rows, -1, LINE)
    run = plgpu.kernel(
        functools.partial(_kernel, tuning),
        out_type=[jax.ShapeDtypeStruct((num_rows,), jnp.float32)] * 2,
        grid=(num_rows,),
        grid_names=("row",),
        num_threads=tuning.warpgroups,
        thread_name="wg",
        compiler_params=COMPILER_PARAMS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    peaks, totals = run(lines)
    # Else a fusion could take in the logarithm's last product, and round it another way.
    log_totals = lax.optimization_barrier(jnp.log(totals))
    return logits - peaks[:, None] - log_totals[:, None]


def _kernel(tuning: SamplingTuningConfig, lines_ref: Any, *out_refs: Any) -> None:
    """Highest logit of one row, and the sum of exp(logit - highest)."""
    index = lax.axis_index("row")
    nothing, off = jnp.int32(0), jnp.float32(0)
    row = Row(lines_ref.at[index], nothing, nothing, nothing, jnp.float32(1), off, off, off)

    def run(shared):
        peak, total = _log_total(row_source(tuning, shared, row))

        @pl.when(lax.axis_index("wg") == 0)
        def _write():
            out_refs[0][index] = peak
            out_refs[1][index] = total

    pl.run_scoped(run, shared_memory(tuning), collective_axes="wg")


def _log_total(source: Source) -> tuple[jax.Array, jax.Array]:
    peak, total = source.fold(_add, (full(LOWEST), full(0.0)))
    of_line = peak.max(axis=1)
    total = total * _exp(peak - spread(of_line))
    peaks, totals = source.gather([of_line, total.sum(axis=1)])
    peak = functools.reduce(jnp.maximum, peaks)
    parts = [total * _exp(line - peak) for line, total in zip(peaks, totals, strict=True)]
    return peak, functools.reduce(jnp.add, parts)


def _add(state, blocks: list[Block]):
    peak, total = state
    higher = functools.reduce(jnp.maximum, [x for x, _ in blocks], peak)
    return higher, sum((_exp(x - higher) for x, _ in blocks), total * _exp(peak - higher))


def _exp(x: jax.Array) -> jax.Array:
    return jnp.exp2(x * LOG2_E)
