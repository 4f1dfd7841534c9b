"""Decode attention by the prefill kernel, so that a token has the same bits as within a chunk."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.paged_inputs import check_paged_inputs
from pallas_kernels.attention.prefill_attention import prefill_attention
from pallas_kernels.attention.tuning import PrefillTuningConfig


def decode_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    interpret: Any = None,
    tuning: PrefillTuningConfig | None = None,
) -> jax.Array:
    """Attend each row's newest query; bit for bit what `prefill_attention` gives for that token.

    The query heads of a KV head lie in one query tile, at one position: the tile's keys are read
    once for all of them. A row's contexts are not split over programs, which would change the
    order of its sums; few rows of long contexts take longer than by the decode kernel.

    Args:
      q: [S, N, H] bfloat16 or float16, already rotated.
      k_pages: [L, P, B, K, H] in q's dtype.
      v_pages: as k_pages.
      layer: [1] int32, which layer to read.
      page_table: [S, M] int32; its first entry is read of rows without tokens, too, unless no row
        behind them has any.
      seq_lens: [S] int32, tokens in cache; 0 = padding row.
      scale: multiplies the logits; positive.
      sliding_window: as for `prefill_attention`.
      soft_cap: likewise.
      interpret: likewise.
      tuning: likewise; that of the chunks, for the same bits.

    Returns:
      [S, N, H] in q's dtype; padding rows are zero.

    Raises:
      ValueError: as `prefill_attention`.
    """
    check_paged_inputs(q, k_pages, v_pages, page_table)
    S, N, H = q.shape
    K = k_pages.shape[3]
    G = N // K
    live_rows = jnp.max(jnp.where(seq_lens > 0, jnp.arange(1, S + 1), 0))
    out = prefill_attention(
        q.reshape(S, K, G, H).swapaxes(1, 2).reshape(S * G, K, H),
        k_pages,
        v_pages,
        layer,
        page_table,
        seq_lens,
        (jnp.minimum(jnp.arange(S + 1), live_rows) * G).astype(jnp.int32),
        jnp.zeros(1, jnp.int32),
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        is_one_position=True,
        interpret=interpret,
        tuning=tuning,
    )
    return out.reshape(S, G, K, H).swapaxes(1, 2).reshape(S, N, H)
