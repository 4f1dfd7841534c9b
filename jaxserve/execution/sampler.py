"""The sampler: logits and rows of the device state to tokens, all rows in one pure function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxserve.execution.sample_mode import SampleMode
from pallas_kernels.platform import AttentionBackend, choose_attention_backend
from pallas_kernels.products import greedy_head
from pallas_kernels.sampling import sampling, xla_sampling
from pallas_kernels.sampling.first_highest import first_highest
from pallas_kernels.sampling.sampling_noise import row_keys

NUM_TOP_LOGPROBS = 20
"""Log-probabilities that the device returns for a row; `max_logprobs` cannot exceed it."""

FEW_DRAW_ROWS = (8, 64)
"""To which the Mosaic draw's rows are padded: up to there its blocks run at the same time, and the
head's product takes as long as reading the head does."""

Draw = Callable[..., tuple[jax.Array, jax.Array]]
"""(logits, keys, temperature, top_k, top_p, min_p) -> tokens, is_finite: `xla_sampling.sample`."""

LogSoftmax = Callable[[jax.Array], jax.Array]
"""float32[S, V] logits to log-probabilities."""

GreedyHead = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""(hidden [S, D], head [V, D]) -> highest logits float32[S], tokens: `greedy_head.greedy_head`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """What the sampler needs of S rows.

    Attributes:
      seeds: uint32[S, 2], high and low word.
      positions: int32[S], index in the sequence of the token to be sampled.
      temperature: float32[S], 0 = greedy.
      top_k: int32[S], 0 = off.
      top_p: float32[S], 1 = off.
      min_p: float32[S], 0 = off.
      stop_ids: int32[S, E], -1 = unused.
      forbids_stop: bool[S], True while fewer than min_tokens were sampled.
    """

    seeds: jax.Array
    positions: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    stop_ids: jax.Array
    forbids_stop: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprobs:
    """Log-probabilities of the raw logits.

    Attributes:
      chosen: float32[S].
      rank: int32[S], 1 = most likely.
      top_values: float32[S, NUM_TOP_LOGPROBS], descending.
      top_ids: int32 of the same shape.
    """

    chosen: jax.Array
    rank: jax.Array
    top_values: jax.Array
    top_ids: jax.Array


def choose_draw(requested: str | None = None) -> Draw:
    """The version of the draw for the default device; asked once, at construction.

    Args:
      requested: "mosaic", "triton", "xla", or None for the best that the device can run; there
        is no Triton version of the draw, so "triton" is XLA's.

    Raises:
      ValueError: `requested` is unknown, or the device cannot run it.
    """
    is_mosaic = choose_attention_backend(requested) == "mosaic"
    return sampling.sample if is_mosaic else xla_sampling.sample


def padded_rows(num_rows: int, sizes: Sequence[int]) -> int:
    """The first of ascending sizes that holds so many rows; the rows themselves where none does."""
    return next((size for size in sizes if size >= num_rows), num_rows)


def choose_greedy_head(
    backend: AttentionBackend, head: jax.ShapeDtypeStruct, *, soft_cap: float | None
) -> GreedyHead | None:
    """The kernel that finds greedy tokens without writing logits, where it takes the head.

    Args:
      backend: of the model's kernels.
      head: [V, D].
      soft_cap: of the logits; rounded, it may make equals of them, of which the first counts.
    """
    fits = greedy_head.fits_greedy_head((1, head.shape[1]), head.shape, head.dtype)
    return greedy_head.greedy_head if backend == "mosaic" and soft_cap is None and fits else None


def split_over_rows(draw: Draw, mesh: Mesh | AbstractMesh) -> Draw:
    """The same function on whole rows of global arrays, each device at its own rows.

    Where the rows do not divide by the devices, each device draws all of them.
    """

    def run(logits: jax.Array, *others: jax.Array) -> tuple[jax.Array, jax.Array]:
        own = PartitionSpec("model" if logits.shape[0] % mesh.shape["model"] == 0 else None)
        # A Pallas call does not say which axes its output varies over, so nothing can be checked.
        split = jax.shard_map(draw, mesh=mesh, in_specs=own, out_specs=own, check_vma=False)
        return split(logits, *others)

    return run


def sample_tokens(
    logits: jax.Array, rows: SamplingRows, mode: SampleMode, draw: Draw
) -> tuple[jax.Array, jax.Array]:
    """Draw one token a row.

    A row's token depends on its logits, seed and position only, not on the other rows.

    Args:
      logits: float32[S, V].
      rows: parameters.
      mode: static; how much of the parameters is used by any row.
      draw: static; see `choose_draw`.

    Returns:
      tokens int32[S], and bool[S]: the row has no NaN, and its highest logit is finite.
    """
    if mode == SampleMode.GREEDY:
        places = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        highest, tokens = first_highest(logits, places)
        return tokens, jnp.isfinite(highest)
    allowed = logits
    if mode == SampleMode.FULL:
        allowed = forbid_stop_ids(logits, rows.stop_ids, rows.forbids_stop)
    keys = row_keys(rows.seeds, rows.positions)
    tokens, is_finite = draw(
        allowed, keys, rows.temperature, rows.top_k, rows.top_p, rows.min_p
    )  # fmt: skip
    if mode == SampleMode.FULL:
        is_finite = xla_sampling.finite_rows(logits)
    return tokens, is_finite


def forbid_stop_ids(logits: jax.Array, stop_ids: jax.Array, forbids: jax.Array) -> jax.Array:
    """Set the logits of int32[S, E] ids to -inf in the rows of bool[S]."""
    S, V = logits.shape
    ids = jnp.where(forbids[:, None] & (stop_ids >= 0), stop_ids, V)
    return logits.at[jnp.arange(S)[:, None], ids].set(-jnp.inf, mode="drop")


def top_logprobs(
    logits: jax.Array, tokens: jax.Array, log_softmax: LogSoftmax = jax.nn.log_softmax
) -> TopLogprobs:
    """Log-probabilities of int32[S] chosen tokens and of the most likely ones, from raw logits."""
    logprobs = log_softmax(logits)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)
    num_top = min(NUM_TOP_LOGPROBS, logits.shape[-1])
    top_values, top_ids = jax.lax.top_k(logprobs, num_top)
    missing = ((0, 0), (0, NUM_TOP_LOGPROBS - num_top))
    return TopLogprobs(
        chosen=chosen[:, 0],
        rank=1 + jnp.sum(logprobs > chosen, axis=-1, dtype=jnp.int32),
        top_values=jnp.pad(top_values, missing, constant_values=-jnp.inf),
        top_ids=jnp.pad(top_ids, missing),
    )
