"""Sleeper: which of a runner's arrays are on the device while its engine sleeps and wakes up."""

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence

import jax

from jaxserve.errors import EngineNotReadyError
from jaxserve.execution.model_runner import ModelRunner
from jaxserve.execution.page_functions import HOST_MEMORY
from jaxserve.sleep_options import KV_CACHE, WEIGHTS

logger = logging.getLogger(__name__)


class Sleeper:
    """Takes weights and cache off the device, and brings them back in shapes and places as before.

    The cache comes and goes together with the device state; its content is lost. Programs stay,
    so nothing is compiled. A GPU's memory returns to JAX's own pool: other JAX code of the process
    can use it, another process only where XLA's allocator is "platform".

    The caller sees that no step is in flight.

    Attributes:
      level: of the sleep, 1 or 2, until all is back on the device; 0 = awake.
    """

    def __init__(self):
        """Begin awake, with everything on the device."""
        self.level = 0
        self._has_weights = self._has_cache = True
        self._host_weights: list[jax.Array] | None = None

    def check_awake(self) -> None:
        """Refuse work while something is missing.

        Raises:
          EngineNotReadyError: it is.
        """
        if self.level:
            raise EngineNotReadyError(
                f"the engine must be awake; it sleeps at level {self.level}; wake it up first"
            )

    def sleep(self, runner: ModelRunner, level: int) -> None:
        """Drop the cache, and keep the weights on the host or drop them, too.

        What a sleep before has left is taken further: weights that lie on the host are dropped by
        level 2, and those that were dropped stay so.

        Args:
          runner: of the engine.
          level: 1 or 2.

        Raises:
          EngineNotReadyError: the host has no memory for the weights; they stay on the device, and
            the engine is awake.
        """
        start = time.monotonic()
        if self._has_weights:
            if level == 1:
                runner.drop_host_pages()  # first, so that the weights can have their memory
                with _needs_memory("the weights must go to the host's memory"):
                    self._host_weights = _copy_to_host(runner.weights)
            runner.drop_weights()
            self._has_weights = False
        elif level == 2:
            self._host_weights = None
        self.drop_cache(runner)
        self.level = 2 if self._host_weights is None else 1
        logger.info("asleep at level %d after %.2f s", self.level, time.monotonic() - start)

    def wake_up(self, runner: ModelRunner, tags: Iterable[str]) -> None:
        """Bring back what is missing of the tags; the engine is awake once nothing is missing.

        Args:
          runner: of the engine.
          tags: of `WAKE_TAGS`.

        Raises:
          EngineNotReadyError: the device has no memory for it; it can be tried again.
          ModelLoadError: the weights' files are missing or refused.
        """
        start = time.monotonic()
        if WEIGHTS in tags:
            self._restore_weights(runner)
        if KV_CACHE in tags:
            self.restore_cache(runner)
        if self.level and self._has_weights and self._has_cache:
            self.level = 0
            logger.info("awake after %.2f s", time.monotonic() - start)

    def drop_cache(self, runner: ModelRunner) -> None:
        """Free the memory of cache and state, unless that was done before."""
        if self._has_cache:
            runner.drop_cache()
            self._has_cache = False

    def restore_cache(self, runner: ModelRunner) -> None:
        """Allocate cache and state, zeros, if they are missing.

        Raises:
          EngineNotReadyError: the device has no memory for them.
        """
        if not self._has_cache:
            with _needs_memory("the KV cache must come back to the device"):
                runner.reset()
            self._has_cache = True

    def _restore_weights(self, runner: ModelRunner) -> None:
        if self._has_weights:
            return
        with _needs_memory("the weights must come back to the device"):
            runner.put_weights(self._host_weights)
        self._host_weights, self._has_weights = None, True


def _copy_to_host(leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """Copies in memory that the devices copy from directly, sharded as before."""
    shardings = [leaf.sharding.with_memory_kind(HOST_MEMORY) for leaf in leaves]
    return jax.block_until_ready(jax.device_put(list(leaves), shardings))


@contextlib.contextmanager
def _needs_memory(rule: str) -> Iterator[None]:
    """Say in one sentence where memory is missing."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        got = str(error).partition("\n")[0][:200] or type(error).__name__
        # The frames of the trace hold the arrays that were made before memory ran out.
        raise EngineNotReadyError(f"{rule}; got {got}") from error.with_traceback(None)
