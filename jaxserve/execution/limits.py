"""Limits: the sizes that an engine gets where its config leaves them open."""

import logging
from dataclasses import dataclass

from jaxserve.config import EngineConfig
from jaxserve.errors import EngineConfigError
from jaxserve.execution.buckets import BucketTable, make_bucket_table
from models.config import ModelConfig
from models.few_rows import MAX_FUSED_CONTEXT, MAX_FUSED_ROWS

logger = logging.getLogger(__name__)

SMALL_GPU_ROW_BUCKETS = (8,)
"""XLA's products of fewer rows are slower than those of eight (measured on an H200)."""
SMALL_FUSED_ROW_BUCKETS = (1, 8)
"""Where one row has kernels of its own, which are faster (models/few_rows.py)."""
SMALL_GPU_SAMPLER_ROWS, SMALL_CPU_SAMPLER_ROWS = 128, 16
LARGE_GPU_BYTES = 60 * 2**30
"""From this memory on a GPU gets vLLM's limits for large GPUs."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The sizes that an engine ended up with."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


def choose_limits(
    config: EngineConfig, model: ModelConfig, *, is_gpu: bool, device_bytes: int | None
) -> Limits:
    """What the config asks for, else defaults of the model and the device.

    Args:
      config: the settings.
      model: the model's numbers.
      is_gpu: whether the device is one.
      device_bytes: that the process may use on a device; None where it does not tell.

    Raises:
      EngineConfigError: max_model_len is longer than the model, or a step of
        max_num_batched_tokens does not take a token of each of max_num_seqs.
    """
    longest = model.max_position_embeddings
    max_model_len = config.fixed_model_len or longest
    if max_model_len > longest:
        raise EngineConfigError(
            f"max_model_len must be at most the model's {longest}; got {max_model_len}"
        )
    default_seqs, default_tokens = _device_defaults(is_gpu, device_bytes or 0)
    budget = config.max_num_batched_tokens
    max_num_seqs = config.max_num_seqs or min(default_seqs, budget or default_seqs)
    budget = budget or max(default_tokens, max_num_seqs)
    if budget < max_num_seqs:
        raise EngineConfigError(
            f"max_num_batched_tokens must be at least max_num_seqs={max_num_seqs}; got {budget}"
        )
    return Limits(
        max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
    )


def choose_buckets(
    config: EngineConfig,
    limits: Limits,
    *,
    is_gpu: bool,
    fuses_few_rows: bool,
    fuses_attention: bool = False,
    num_scheduler_steps: int = 1,
    multi_step_rows: int = 0,
) -> BucketTable:
    """The padded shapes; a CPU gets few, since it computes each padded row.

    Args:
      config: the settings.
      limits: the sizes.
      is_gpu: whether the device is one.
      fuses_few_rows: see `ModelSetup`.
      fuses_attention: likewise.
      num_scheduler_steps: decode steps that one program of few rows runs.
      multi_step_rows: most rows of such a program.
    """
    row_buckets, token_buckets = config.row_buckets, config.token_buckets
    if not is_gpu:
        row_buckets, token_buckets = row_buckets or (1,), token_buckets or (8, 64)
    small = SMALL_FUSED_ROW_BUCKETS if fuses_few_rows else SMALL_GPU_ROW_BUCKETS
    has_long = fuses_attention and limits.max_model_len > MAX_FUSED_CONTEXT
    table = make_bucket_table(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        small_row_buckets=small if is_gpu else (1,),
        small_sampler_rows=SMALL_GPU_SAMPLER_ROWS if is_gpu else SMALL_CPU_SAMPLER_ROWS,
        row_buckets=row_buckets,
        token_buckets=token_buckets,
        num_scheduler_steps=num_scheduler_steps,
        multi_step_rows=multi_step_rows,
        short_context=MAX_FUSED_CONTEXT if has_long else 0,
        short_context_rows=MAX_FUSED_ROWS if has_long else 0,
    )
    if (config.num_scheduler_steps or 1) > table.num_scheduler_steps:
        logger.warning(
            "num_scheduler_steps needs a row bucket of at most %d rows; got %s, so that each step "
            "is a dispatch of its own",
            multi_step_rows,
            table.row_buckets,
        )
    return table


def _device_defaults(is_gpu: bool, device_bytes: int) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens), as vLLM chooses them by the GPU's memory."""
    if not is_gpu:
        return 8, 256
    return (1024, 8192) if device_bytes >= LARGE_GPU_BYTES else (256, 2048)
