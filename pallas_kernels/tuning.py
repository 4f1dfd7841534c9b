"""TuningConfig of each kernel and the table (GPU, head dim, dtype) -> config."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTuningConfig:
    """Sizes of the decode attention kernel.

    Attributes:
      block_tokens: keys a tile, a multiple of 64.
      num_stages: K tiles (and as many V tiles) in flight.
      num_processors: streaming multiprocessors to fill; more programs get no KV splits.
      min_split_tokens: no split of the context is made shorter than this.
      heads_together: the KV heads of a row run side by side (they share its pages' memory rows);
        False = the rows of one KV head do.
    """

    block_tokens: int
    num_stages: int
    num_processors: int = 132
    min_split_tokens: int = 256
    heads_together: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTuningConfig:
    """Sizes of the prefill attention kernel.

    Attributes:
      block_tokens: keys a tile, a multiple of 64.
      num_stages: K tiles (and as many V tiles) in flight.
      compute_warpgroups: 1 or 2, of 64 queries each, that share the K and V tiles.
      num_programs: thread blocks that share the query tiles; one fits a multiprocessor.
      compute_registers: registers of a thread that computes, where there are two warpgroups.
      load_registers: registers of a thread of the loading warpgroup, likewise.
    """

    block_tokens: int
    num_stages: int
    compute_warpgroups: int = 2
    num_programs: int = 132
    compute_registers: int = 232
    load_registers: int = 40


# Not yet tuned: chosen so that the tiles fit into 227 KiB of shared memory.
_DECODE_BY_HEAD_DIM = {
    64: DecodeTuningConfig(block_tokens=64, num_stages=6),
    128: DecodeTuningConfig(block_tokens=64, num_stages=4),
    256: DecodeTuningConfig(block_tokens=64, num_stages=2),
}
_PREFILL_BY_HEAD_DIM = {
    64: PrefillTuningConfig(block_tokens=128, num_stages=4),
    128: PrefillTuningConfig(block_tokens=128, num_stages=2),
    256: PrefillTuningConfig(block_tokens=64, num_stages=2, compute_warpgroups=1),
}

# Measured choices: (device kind, stored head dim, dtype name) -> config.
_DECODE: dict[tuple[str, int, str], DecodeTuningConfig] = {}
_PREFILL: dict[tuple[str, int, str], PrefillTuningConfig] = {}


def decode_tuning(gpu: str | None, head_dim: int, dtype: DTypeLike) -> DecodeTuningConfig:
    """Config of decode attention; that of the head dim where the GPU has no entry."""
    key = (gpu or "", head_dim, jnp.dtype(dtype).name)
    return _DECODE.get(key, _DECODE_BY_HEAD_DIM[head_dim])


def prefill_tuning(gpu: str | None, head_dim: int, dtype: DTypeLike) -> PrefillTuningConfig:
    """Config of prefill attention; that of the head dim where the GPU has no entry."""
    key = (gpu or "", head_dim, jnp.dtype(dtype).name)
    return _PREFILL.get(key, _PREFILL_BY_HEAD_DIM[head_dim])
