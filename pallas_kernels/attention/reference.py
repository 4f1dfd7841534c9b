"""The plain jnp meaning of every kernel, in float32, for tests only."""

import jax
import jax.numpy as jnp

from pallas_kernels.attention.paged_inputs import check_paged_inputs


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """Attend each row's newest queries to its cached pages, causally.

    Row s has the tokens `[query_start_loc[s], query_start_loc[s + 1])`; the last of them stands
    at position `seq_lens[s] - 1`.

    Args:
      q: [T, N, H] queries, already rotated.
      k_pages: [L, P, B, K, H] keys, all pages of all layers, this step's included.
      v_pages: [L, P, B, K, H] values.
      layer: [1] int32, which layer to read.
      page_table: [S, M] int32; entries past a row's end have no meaning.
      seq_lens: [S] int32, tokens in cache, this step's included; 0 = padding row.
      query_start_loc: [S + 1] int32, cumulative query offsets.
      scale: multiplies the logits.
      sliding_window: a query at position p sees the keys `(p - sliding_window, p]`.
      soft_cap: logits x become `soft_cap * tanh(x / soft_cap)`.

    Returns:
      [T, N, H] in q's dtype; tokens of no row are zero.

    Raises:
      ValueError: the shapes do not fit together.
    """
    check_paged_inputs(q, k_pages, v_pages, page_table)
    num_tokens, num_heads, _ = q.shape
    _, num_pages, page_size, num_kv_heads, _ = k_pages.shape
    token = jnp.arange(num_tokens)
    row = jnp.searchsorted(query_start_loc, token, side="right") - 1
    valid = (row >= 0) & (row < seq_lens.shape[0])
    row = jnp.clip(row, 0, seq_lens.shape[0] - 1)
    position = seq_lens[row] - (query_start_loc[row + 1] - token)
    key = jnp.arange(page_table.shape[1] * page_size)
    visible = (key <= position[:, None]) & valid[:, None]
    if sliding_window is not None:
        visible &= key > position[:, None] - sliding_window

    table = jnp.clip(page_table, 0, num_pages - 1)
    keys, values = (
        jnp.repeat(pages[layer[0]][table].reshape(seq_lens.shape[0], key.size, num_kv_heads, -1),
                   num_heads // num_kv_heads, axis=2).astype(jnp.float32)[row]
        for pages in (k_pages, v_pages)
    )  # fmt: skip
    logits = jnp.einsum("tnh,tcnh->tnc", q.astype(jnp.float32), keys, precision="highest") * scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    mask = visible[:, None, :]
    weights = jax.nn.softmax(jnp.where(mask, logits, -1e30), axis=-1) * mask
    values = jnp.where(visible[:, :, None, None], values, 0)
    out = jnp.einsum("tnc,tcnh->tnh", weights, values, precision="highest")
    return out.astype(q.dtype)
