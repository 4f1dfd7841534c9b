"""An engine process whose device fails after a few steps; run as the real one, with a mode more."""

import logging
import os
import sys
import time

import jax

from jaxserve.distributed.engine_process import main
from jaxserve.execution.batch_builder import PackedBatch
from jaxserve.execution.model_runner import ModelRunner, StepHandle
from jaxserve.step import StepResult
from tests.jaxserve.faulty_runner import INTERNAL

NUM_GOOD_STEPS = 4
HANG_SECONDS = 120


class FailingRunner(ModelRunner):
    """Works for a few steps. Then its device hangs in `collect`, or every dispatch fails."""

    mode = ""
    num_steps = 0

    def dispatch(self, batch: PackedBatch) -> StepHandle:
        self.num_steps += 1
        if self.mode == "internal" and self.num_steps > NUM_GOOD_STEPS:
            raise jax.errors.JaxRuntimeError(INTERNAL)
        return super().dispatch(batch)

    def collect(self, handle: StepHandle) -> StepResult:
        if self.mode == "hang" and self.num_steps > NUM_GOOD_STEPS:
            time.sleep(HANG_SECONDS)
        return super().collect(handle)


if __name__ == "__main__":
    from jaxserve import engine_builder

    FailingRunner.mode = sys.argv.pop()
    engine_builder.ModelRunner = FailingRunner  # pyright: ignore[reportPrivateImportUsage]
    status = main(*map(int, sys.argv[1:]))
    logging.shutdown()
    os._exit(status)
