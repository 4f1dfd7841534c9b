"""Whether an evicted page is cheaper to fetch from the host than to compute again."""

import logging
import math
import time
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

logger = logging.getLogger(__name__)

PreemptionMode = Literal["auto", "swap", "recompute"]
NUM_ROWS = 1024  # of the product that is timed
NUM_RUNS = 3


@dataclass(frozen=True, slots=True)
class PageCosts:
    """Two ways to have a page of every group back, in seconds.

    Attributes:
      fetch: over the bus, measured.
      compute: a prompt's tokens through all products, at the measured rate of one of them.
    """

    fetch: float
    compute: float

    def pays(self, mode: PreemptionMode) -> bool:
        """Whether evicted pages go to the host."""
        return mode == "swap" or (mode == "auto" and self.fetch < self.compute)

    def log(self, *, is_used: bool) -> None:
        """Say what was measured, and what follows."""
        logger.info(
            "a page is fetched from the host in %.0f us and computed in %.0f us: evicted pages %s",
            self.fetch * 1e6,
            self.compute * 1e6,
            "go to the host" if is_used else "are dropped; preemption_mode='swap' keeps them",
        )


def seconds_to_compute(page_size: int, leaves: list[jax.Array], vocab_size: int) -> float:
    """Time of a page's tokens in a full prompt step: two FLOPs a weight and token.

    Attention is left out, so long contexts cost more than this says.

    Args:
      page_size: tokens.
      leaves: the weights; those of the vocabulary, which prompt tokens skip, do not count.
      vocab_size: V.
    """
    matrices = [leaf for leaf in leaves if leaf.ndim > 1 and leaf.shape[0] != vocab_size]
    num_weights = sum(math.prod(leaf.shape) for leaf in matrices)
    width = next((leaf.shape[-1] for leaf in matrices if leaf.ndim == 2), 1024)
    return 2 * num_weights * page_size / measure_product_rate(width, leaves[0].dtype)


def measure_product_rate(width: int, dtype: jnp.dtype) -> float:
    """FLOP/s of one product of 1,024 rows with a weight of [width, 4 * width]."""
    multiply = jax.jit(jnp.dot)
    x, weight = (
        jax.random.normal(jax.random.key(0), shape, jnp.float32).astype(dtype)
        for shape in ((NUM_ROWS, width), (width, 4 * width))
    )
    jax.block_until_ready(multiply(x, weight))
    start = time.perf_counter()
    jax.block_until_ready([multiply(x, weight) for _ in range(NUM_RUNS)])
    return NUM_RUNS * 2 * NUM_ROWS * width * 4 * width / (time.perf_counter() - start)
