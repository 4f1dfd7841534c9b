"""warm_up: runs every step program once, so that no request pays for a program's first run."""

import logging
import time
from collections.abc import Iterable

import jax

from jaxserve.execution.batch_builder import BatchBuilder
from jaxserve.execution.buckets import BucketTable
from jaxserve.execution.model_runner import ModelRunner
from jaxserve.execution.sample_mode import SampleMode

logger = logging.getLogger(__name__)


def warm_up(runner: ModelRunner, builder: BatchBuilder, buckets: BucketTable) -> None:
    """Run steps without rows: kernels are loaded and graphs recorded, and no state changes.

    Padding writes to the null page only, as in every step.

    Args:
      runner: of the engine, before its first step.
      builder: makes the batches.
      buckets: whose programs to run.
    """
    start = time.monotonic()
    for bucket in buckets.all():
        modes: Iterable[SampleMode | None] = (None,)
        if bucket.fuses_sampler:
            modes = (mode for mode in SampleMode if mode.is_fused)
        for mode in modes:
            runner.dispatch(builder.empty(bucket, mode))
    cheapest = next(bucket for bucket in buckets.all() if not bucket.fuses_sampler)
    for mode in SampleMode:
        for rows in buckets.sampler_sizes(is_greedy=mode == SampleMode.GREEDY):
            runner.dispatch(builder.empty(cheapest, mode, sampler_rows=rows))
    jax.block_until_ready(runner.cache)
    logger.info("all programs ran once in %.2f s", time.monotonic() - start)
