"""ForwardBatch: what one forward pass reads."""

from dataclasses import dataclass, field

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """The inputs of one forward pass over T padded tokens of S padded sequences.

    Decode rows come first: row `i < num_decode_rows` has one token, the batch's token `i`.

    Attributes:
      token_ids: int32[T]; padding is 0.
      positions: int32[X, T]; X = 1 axis of positions for text.
      slot_mapping: for each cache group int32[T]: where the token's keys and values go,
        page * page_size + offset; in the null page 0 for padding.
      page_tables: for each cache group int32[S, max_pages].
      seq_lens: int32[S], tokens in cache after this step; 0 for padding rows.
      query_start_loc: int32[S + 1], cumulative query tokens (FlashAttention's cu_seqlens_q).
      num_decode_rows: int32[1].
      logits_indices: int32[R], the tokens whose hidden state is returned.
      inputs_embeds: [T, D] or None; used instead of the token's embedding where the mask is set.
      inputs_embeds_mask: bool[T] or None.
      is_decode_only: static; T = S and every row is a decode row or padding.
    """

    token_ids: jax.Array
    positions: jax.Array
    slot_mapping: tuple[jax.Array, ...]
    page_tables: tuple[jax.Array, ...]
    seq_lens: jax.Array
    query_start_loc: jax.Array
    num_decode_rows: jax.Array
    logits_indices: jax.Array
    inputs_embeds: jax.Array | None = None
    inputs_embeds_mask: jax.Array | None = None
    is_decode_only: bool = field(default=False, metadata={"static": True})
