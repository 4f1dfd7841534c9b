"""A ring of steps in shared memory, from a loading warpgroup to those that multiply."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class Barriers(Protocol):
    """Those of a ring, one of each a slot; slots are taken in turn."""

    @property
    def full(self) -> Any:
        """Its step has come."""
        ...

    @property
    def free(self) -> Any:
        """All who read it are done."""
        ...


def multiply_steps(
    ring: Barriers,
    position: jax.Array,
    steps: jax.Array | int,
    stages: int,
    multiply: Callable[[jax.Array], None],
    *,
    num_products: int = 1,
) -> None:
    """Multiply step after step; a slot comes free when the products of the step after it are begun.

    So a ring of one slot would wait for itself.

    Args:
      ring: whose steps they are.
      position: number of the first step, from the ring's beginning on.
      steps: how many, at least 1.
      stages: slots of the ring, at least 2.
      multiply: begins the WGMMAs of a slot.
      num_products: how many those are.
    """
    stages = jnp.int32(stages)

    @pl.loop(0, steps)
    def _step(index):
        slot = lax.rem(position + index, stages)
        plgpu.barrier_wait(ring.full.at[slot])
        multiply(slot)
        plgpu.wgmma_wait(num_products)  # those of the step before are done with their slot

        @pl.when(index > 0)
        def _free_last_slot():
            plgpu.barrier_arrive(ring.free.at[lax.rem(position + index - 1, stages)])

    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(ring.free.at[lax.rem(position + steps - 1, stages)])


def drain(ring: Barriers, first: jax.Array, end: jax.Array, stages: jax.Array) -> None:
    """Wait until the last steps' slots, from `first` to `end`, are free: no barrier dies in use."""

    @pl.loop(first, end)
    def _wait(position):
        plgpu.barrier_wait(ring.free.at[lax.rem(position, stages)])
