"""A runner whose steps fail as they are told to, the way that XLA fails."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxserve.engine import Engine
from jaxserve.execution.batch_builder import PackedBatch
from jaxserve.execution.model_runner import ModelRunner, StepHandle
from jaxserve.step import StepResult

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 68719476736 bytes."
INTERNAL = "INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered"


class FaultyRunner:
    """Counts its dispatches from 0 and its collects, and runs a fault in front of chosen ones.

    Attributes:
      num_dispatched, num_collected: calls so far, the failed ones included.
      num_faults: faults that were run.
      faults: (method, number of the call) -> what to run; it may raise.
      num_resets: of cache and state.
      reset_error: raised by a reset.
    """

    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self.num_dispatched = self.num_collected = self.num_faults = self.num_resets = 0
        self.faults: dict[tuple[str, int], Callable[[], None]] = {}
        self.reset_error: Exception | None = None
        self.token_counts: list[int] = []

    @classmethod
    def of(cls, engine: Engine, method: str, numbers: list[int], fault: Callable) -> "FaultyRunner":
        """Put one between an engine and its runner; the fault is called with the runner."""
        faulty = cls(engine.runner)
        faulty.faults = {(method, number): lambda: fault(faulty.runner) for number in numbers}
        engine.runner = cast(ModelRunner, faulty)
        return faulty

    def dispatch(self, batch: PackedBatch) -> StepHandle:
        number, self.num_dispatched = self.num_dispatched, self.num_dispatched + 1
        self.token_counts.append(batch.num_tokens)
        self._fail("dispatch", number)
        return self.runner.dispatch(batch)

    def collect(self, handle: StepHandle) -> StepResult:
        number, self.num_collected = self.num_collected, self.num_collected + 1
        self._fail("collect", number)
        return self.runner.collect(handle)

    def reset(self) -> None:
        self.num_resets += 1
        if self.reset_error is not None:
            raise self.reset_error
        self.runner.reset()

    def is_intact(self) -> bool:
        return self.runner.is_intact()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def _fail(self, method: str, number: int) -> None:
        fault = self.faults.get((method, number))
        if fault is not None:
            self.num_faults += 1
            fault()


def raises(message: str) -> Callable[[ModelRunner], None]:
    """XLA's error, raised with the arrays unharmed."""

    def fault(runner: ModelRunner) -> None:
        raise jax.errors.JaxRuntimeError(message)

    return fault


def _too_large(arrays: Any) -> Any:
    numbers = jax.random.normal(jax.random.key(0), (1 << 20, 1 << 20))
    numbers = jnp.sort(jnp.sort(numbers, axis=0), axis=1)
    return jax.tree.map(lambda leaf: leaf + numbers[3, 5].astype(leaf.dtype), arrays)


def runs_out_of_memory(runner: ModelRunner) -> None:
    """A program that finds no memory gets cache and state donated, and its dispatch succeeds.

    No machine gives its 17 TB, so the error is XLA's own and the arrays are truly lost.
    """
    arrays = (runner._cache, runner._state)
    program = jax.jit(_too_large, donate_argnums=0).lower(arrays).compile()
    runner._cache, runner._state = program(arrays)


def loses_arrays(message: str) -> Callable[[ModelRunner], None]:
    """XLA's error, raised by a program that the arrays were donated to."""

    def fault(runner: ModelRunner) -> None:
        for leaf in jax.tree.leaves((runner._cache, runner._state)):
            leaf.delete()
        raise jax.errors.JaxRuntimeError(message)

    return fault
