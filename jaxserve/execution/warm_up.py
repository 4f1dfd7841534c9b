"""warm_up: runs every step program once, so that no request pays for a program's first run."""

import logging
import time

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
        for mode in SampleMode:
            if mode.is_fused or not bucket.is_decode_only:
                runner.dispatch(builder.empty(bucket, mode))
    jax.block_until_ready(runner.cache)
    logger.info("all programs ran once in %.2f s", time.monotonic() - start)
