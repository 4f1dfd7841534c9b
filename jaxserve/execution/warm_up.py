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
    sampled = set[int]()  # rows of mixed buckets whose samplers ran; the cheap buckets come first
    for bucket in buckets.all():
        modes: Iterable[SampleMode | None] = SampleMode
        if bucket.is_decode_only:
            modes = (mode for mode in SampleMode if mode.is_fused)
        elif bucket.num_rows in sampled:
            modes = (None,)
        else:
            sampled.add(bucket.num_rows)
        for mode in modes:
            runner.dispatch(builder.empty(bucket, mode))
    jax.block_until_ready(runner.cache)
    logger.info("all programs ran once in %.2f s", time.monotonic() - start)
