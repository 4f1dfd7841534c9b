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
      dependent_launch: let this kernel start before the one ahead of it has ended, and the next
        one before this has (programmatic dependent launch). Only the plan is read early: it must
        be older than the kernel ahead.
    """

    block_tokens: int
    num_stages: int
    num_workers: int = 3
    num_processors: int = 132
    programs_per_processor: int = 1
    min_split_tokens: int = 512
    dependent_launch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTuningConfig:
    """Sizes of the prefill attention kernel.

    Attributes:
      block_tokens: keys a tile, a multiple of 64.
      num_stages: K tiles (and as many V tiles) in flight.
      compute_warpgroups: 1 to 3, of 64 queries each, that share the K and V tiles.
      query_buffers: query tiles in shared memory; with 2 the next one is fetched early.
      ping_pong: two computing warpgroups take turns at the tensor cores.
      overlap: the values of a block are multiplied during the softmax of the next one.
      num_programs: thread blocks that share the query tiles; one fits a multiprocessor.
      compute_registers: registers of a thread that computes, where there are several warpgroups.
      load_registers: registers of a thread of the loading warpgroup, likewise.

    Raises:
      ValueError: ping_pong without two computing warpgroups, or more registers than there are.
    """

    block_tokens: int
    num_stages: int
    compute_warpgroups: int = 2
    query_buffers: int = 2
    ping_pong: bool = False
    overlap: bool = False
    num_programs: int = 132
    compute_registers: int = 232
    load_registers: int = 40

    def __post_init__(self) -> None:
        """Refuse what would hang: turns that nobody takes, and registers that never come."""
        if self.ping_pong and self.compute_warpgroups != 2:
            raise ValueError(
                "compute_warpgroups must be 2 with ping_pong; got "
                f"compute_warpgroups={self.compute_warpgroups}"
            )
        warpgroups = self.compute_warpgroups + 1
        available = 65536 // (128 * warpgroups) // 8 * 8 * warpgroups
        used = self.compute_registers * self.compute_warpgroups + self.load_registers
        if self.compute_warpgroups > 1 and used > available:
            raise ValueError(
                f"registers of one thread of each of {warpgroups} warpgroups must be at most "
                f"{available} together; got {used}"
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
