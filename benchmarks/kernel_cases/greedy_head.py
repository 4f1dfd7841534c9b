"""The head that keeps each row's highest logit: checked against XLA's logits, then timed."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.kernel_cases.products import seconds_in_a_chain
from benchmarks.kernel_cases.timing import random_array
from pallas_kernels.products.greedy_head import greedy_head
from pallas_kernels.products.greedy_head_plan import GreedyHeadTuning
from pallas_kernels.sampling.first_highest import first_highest

TOLERANCE = 1e-3  # of logits around 1, whose sums go in another order
EQUAL_COLUMNS = (5, 130, -1)  # of the check's row 0, the highest ones

# model -> (D, V)
MODELS = {"0.6B": (1024, 151_936), "8B": (4096, 128_256)}
CHECKED_ROWS = (1, 8, 64, 104, 128, 256, 320, 1024)
TIMED_ROWS = (8, 64, 128, 192, 256, 320, 512, 1024)
# Changes of the tuning.
VARIANTS: dict[str, dict[str, int]] = {
    "as it is": {},
    "columns 192": {"columns": 192},
    "columns 128": {"columns": 128},
}


def cases() -> dict[str, Callable[[], dict[str, Any]]]:
    """Name -> check or timing; "greedy head check" or "greedy head time" chooses a kind."""
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for (model, shape), rows in itertools.product(MODELS.items(), CHECKED_ROWS):
        found[f"greedy head check {model} {rows} rows"] = functools.partial(check, rows, *shape)
    found["greedy head check odd vocabulary fp16"] = functools.partial(
        check, 77, 192, 50_264, "float16"
    )
    for name, changes in VARIANTS.items():
        checked = functools.partial(check, 256, *MODELS["0.6B"], changes=changes)
        found[f"greedy head check 0.6B 256 rows {name}"] = checked
    for (model, shape), rows in itertools.product(MODELS.items(), TIMED_ROWS):
        title = f"greedy head time {model} {rows} rows"
        found[f"{title} by XLA and a reduce"] = functools.partial(time, by_xla, rows, *shape)
        for name, changes in VARIANTS.items():
            tuning = GreedyHeadTuning(**changes)
            by_kernel = functools.partial(greedy_head, tuning=tuning)
            found[f"{title} {name}"] = functools.partial(time, by_kernel, rows, *shape)
    return found


def check(
    rows: int,
    depth: int,
    vocabulary: int,
    dtype: str = "bfloat16",
    changes: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Compare with XLA's logits, whose order of sums may choose another of near columns.

    Row 0 has equal columns, all logits of row 1 are NaN, and row 2 has one NaN among infinities.
    """
    hidden, head = _inputs(rows, depth, vocabulary, dtype)
    equal = jnp.array(EQUAL_COLUMNS)
    hidden, head = hidden.at[0].set(4 * head[5]), head.at[equal].set(4 * head[5])
    hidden = hidden.at[1:2, 3].set(jnp.nan).at[2:3, 7].set(jnp.inf)
    head = head.at[:, 7].set(1).at[vocabulary // 2, 7].set(0)
    tuning = GreedyHeadTuning(**(changes or {}))

    @jax.jit
    def compare(hidden, head):
        highest, tokens = greedy_head(hidden, head, tuning=tuning)
        logits = _logits(hidden, head)
        chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
        want, want_tokens = _highest(logits)
        errors = jnp.maximum(jnp.abs(highest - want), want - chosen)
        errors = jnp.where(jnp.isfinite(errors), errors, jnp.inf).at[1:3].set(0)
        others = (tokens != want_tokens).at[1:3].set(False)
        return errors.max(), highest, tokens, others.sum()

    worst, highest, tokens, others = compare(hidden, head)
    has_first, has_nan = tokens[0] == EQUAL_COLUMNS[0], jnp.isnan(highest[1:3]).all()
    no_more_nan = not jnp.isnan(highest[3:]).any()
    return {
        "ok": bool(worst < TOLERANCE and has_first and has_nan and no_more_nan),
        "worst_error": float(worst),
        "first_of_equals": bool(has_first),
        "nan_is_seen": bool(has_nan),
        "other_tokens": int(others),
    }


def by_xla(hidden: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What the sampler does without the kernel: all logits, and one pass over them."""
    return _highest(_logits(hidden, head))


def time(
    choose: Callable[..., tuple[jax.Array, jax.Array]], rows: int, depth: int, vocabulary: int
) -> dict[str, Any]:
    """Of tokens and whether they are finite, in a chain; L2 holds no such head.

    The tokens are floats, since XLA would know that a whole number times 0 depends on nothing.
    """
    hidden, head = _inputs(rows, depth, vocabulary, "bfloat16")

    def tokens(hidden, _, head):
        highest, tokens = choose(hidden, head)
        return jnp.where(jnp.isfinite(highest), tokens.astype(jnp.float32), jnp.nan)

    seconds = seconds_in_a_chain(tokens, hidden, head, layers=1)
    return {
        "microseconds": round(seconds * 1e6, 2),
        "tflops": round(2 * rows * depth * vocabulary / seconds / 1e12, 1),
        "head_gb_per_second": round(head.nbytes / seconds / 1e9),
    }


def _inputs(rows: int, depth: int, vocabulary: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Hidden states [S, D] and a head [V, D] whose logits are normal."""
    head = random_array(2, (vocabulary, depth), dtype)
    return random_array(3, (rows, depth), dtype), head * jnp.asarray(depth**-0.5, dtype)


def _logits(hidden: jax.Array, head: jax.Array) -> jax.Array:
    """float32[S, V]."""
    return jnp.einsum("rd,vd->rv", hidden, head, preferred_element_type=jnp.float32)


def _highest(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The highest of each row, and its first place, as the sampler finds them."""
    return first_highest(logits, lax.broadcasted_iota(jnp.int32, logits.shape, 1))
