"""TuningConfig of each kernel and the table (GPU, head dim, dtype) -> config."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTuningConfig:
    """Sizes of the decode attention kernel.

    Attributes:
      block_tokens: keys a tile, a multiple of 64.
      num_stages: K tiles (and as many V tiles) in flight for each worker; fewer where many query
        heads a KV head leave no shared memory for them.
      num_workers: warpgroups of a thread block that compute; they take turns at the blocks.
      num_processors: streaming multiprocessors to fill.
      programs_per_processor: thread blocks that fit one multiprocessor.
      min_split_tokens: contexts are cut into pieces of about this length, or longer.
    """

    block_tokens: int
    num_stages: int
    num_workers: int = 3
    num_processors: int = 132
    programs_per_processor: int = 1
    min_split_tokens: int = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTuningConfig:
    """Sizes of the prefill attention kernel.

    Attributes:
      block_tokens: keys a tile, a multiple of 64.
      num_stages: K tiles (and as many V tiles) in flight.
      compute_warpgroups: 1 or 2, of 64 queries of one head each, that share the K and V tiles.
      ping_pong: two computing warpgroups take turns at the tensor cores.
      num_programs: thread blocks that share the query tiles; one fits a multiprocessor.

    Raises:
      ValueError: not 1 or 2 computing warpgroups, or turns with one alone.
    """

    block_tokens: int
    num_stages: int
    compute_warpgroups: int = 2
    ping_pong: bool = False
    num_programs: int = 132

    def __post_init__(self) -> None:
        """Refuse more warpgroups than there are registers for, and turns that nobody takes."""
        if self.compute_warpgroups not in (1, 2):
            raise ValueError(f"compute_warpgroups must be 1 or 2; got {self.compute_warpgroups}")
        if self.ping_pong and self.compute_warpgroups != 2:
            raise ValueError(
                "compute_warpgroups must be 2 with ping_pong; got "
                f"compute_warpgroups={self.compute_warpgroups}"
            )


# Not yet tuned: chosen so that the tiles fit into 227 KiB of shared memory.
_DECODE_BY_HEAD_DIM = {
    64: DecodeTuningConfig(block_tokens=64, num_stages=4),
    128: DecodeTuningConfig(block_tokens=64, num_stages=2),
    256: DecodeTuningConfig(block_tokens=64, num_stages=3, num_workers=1),
}
_PREFILL_BY_HEAD_DIM = {
    64: PrefillTuningConfig(block_tokens=128, num_stages=4, ping_pong=True),
    128: PrefillTuningConfig(block_tokens=128, num_stages=2, ping_pong=True),
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
