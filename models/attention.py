"""Attention over a cache group: projections, rotary embedding, the write, and the right kernel."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models import few_rows
from models.batch import ForwardBatch
from models.config import ModelConfig
from models.kernels import Kernel, ModelKernels
from models.kv_cache import CacheGroup, KVCache
from models.layer_slice import LayerSlice
from models.layers import DenseFormat, Linear, RMSNorm


class Attention(nnx.Module):
    """Grouped-query attention with a fused qkv weight `[D, K, G + 2, H]`."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: str,
        kernels: ModelKernels,
        cache_group: int,
        qk_norm_class: type[RMSNorm] | None = None,
    ):
        D, H = config.hidden_size, config.head_dim
        K, G = config.num_key_value_heads, config.num_query_heads_per_kv_head
        weight_format = DenseFormat(dtype, kernels)
        self.heads, self.head_dim = (K, G), H
        self.kernels, self.cache_group = kernels, cache_group
        self.scale, self.soft_cap = config.attention_scale, config.attn_logit_softcapping
        self.qkv_proj = Linear(
            (D,),
            (K, G + 2, H),
            axes=("embed", "kv_heads", "group", "head_dim"),
            weight_format=weight_format,
            bias_dtype=dtype if config.attention_bias or config.qkv_bias else None,
        )
        self.o_proj = Linear(
            (K, G, H),
            (D,),
            axes=("kv_heads", "group", "head_dim", "embed"),
            weight_format=weight_format,
            bias_dtype=dtype if config.attention_bias else None,
        )
        self.q_norm, self.k_norm = (
            qk_norm_class
            and qk_norm_class(
                H, eps=config.rms_norm_eps, dtype=dtype, kernels=kernels, axis="head_dim"
            )
            for _ in "qk"
        )

    def project(
        self, x: jax.Array, delta: jax.Array | None, norm: RMSNorm
    ) -> tuple[jax.Array, jax.Array]:
        """The new residual [T, D] of `norm.add`; of its norm, qkv: a sum of [T, K, G + 2, H]."""
        return self.qkv_proj.multiply_normed(x, delta, norm)

    def __call__(
        self,
        qkv: jax.Array,
        batch: ForwardBatch,
        cache: KVCache,
        layer: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        rows: jax.Array | None,
    ) -> tuple[jax.Array, KVCache]:
        """Attend.

        Args:
          qkv: of `project`, still without its bias.
          batch: of this pass.
          cache: all groups.
          layer: int32[1], index of this layer within its cache group.
          angles: cosine and sine of the positions, float32[T, rotary_dim / 2].
          rows: int32[R], the tokens whose output is projected; None = all, R = T.

        Returns:
          A sum of [R, D], and the cache with the keys and values of all T tokens.
        """
        group = cache.groups[self.cache_group]
        write = self.kernels.rotary_write
        is_attended = self._fits_few_rows(qkv, group, batch, 2 * angles[0].shape[-1])
        if is_attended:
            row_arrays = (batch.page_tables[self.cache_group], batch.seq_lens)
            run = few_rows.attention(*row_arrays, **self._options(group))
            write = functools.partial(write, run=run)
        out, group = self._write(write, qkv, group, layer, batch, angles)
        if not is_attended:
            out = self._attend(out, group, layer, batch)
        if rows is not None:
            out = out[rows]
        out = out[..., : self.head_dim].reshape(out.shape[0], *self.heads, self.head_dim)
        return self.o_proj(out), cache.with_group(self.cache_group, group)

    def _fits_few_rows(
        self, qkv: jax.Array, group: CacheGroup, batch: ForwardBatch, rotary_dim: int
    ) -> bool:
        """Whether one kernel writes and attends: every row is a token, and they are few."""
        return (
            batch.is_decode_only
            and self.kernels.fuses_few_rows
            and few_rows.fits_attention(
                qkv, batch.page_tables[self.cache_group], rotary_dim, group.geometry
            )
        )

    def _options(self, group: CacheGroup) -> dict[str, Any]:
        """Which keys a query sees, and how its logits are made."""
        return dict(
            scale=self.scale, sliding_window=group.geometry.sliding_window, soft_cap=self.soft_cap
        )

    def _write(
        self,
        write: Kernel,
        qkv: jax.Array,
        group: CacheGroup,
        layer: jax.Array,
        batch: ForwardBatch,
        angles: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, CacheGroup]:
        """Put keys and values of a sum of [T, K, G + 2, H] into the cache.

        Returns:
          What `write` makes of the queries, [T, N, stored_head_dim]: rotated, or attended already
          where it is given `few_rows.attention`. And the cache group with the keys and values.
        """
        norm, bias = self.q_norm, self.qkv_proj.bias
        q, k_pages, v_pages = write(
            qkv,
            group.k_pages,
            group.v_pages,
            layer,
            batch.slot_mapping[self.cache_group],
            *angles,
            None if bias is None else LayerSlice.of(bias.get_value()),
            None if self.q_norm is None else self.q_norm.gains(),
            None if self.k_norm is None else self.k_norm.gains(),
            eps=0.0 if norm is None else norm.eps,
            gain_offset=0.0 if norm is None else norm.gain_offset,
        )
        return q, replace(group, k_pages=k_pages, v_pages=v_pages)

    def _attend(
        self, q: jax.Array, group: CacheGroup, layer: jax.Array, batch: ForwardBatch
    ) -> jax.Array:
        """[T, N, stored_head_dim], the same: decode rows by one kernel, chunks by the other."""
        pages = (group.k_pages, group.v_pages, layer, batch.page_tables[self.cache_group])
        options = self._options(group)
        num_rows = batch.seq_lens.shape[0]
        if batch.is_decode_only:
            return self.kernels.decode(q, *pages, batch.seq_lens, **options)
        is_decode_row = jnp.arange(num_rows) < batch.num_decode_rows
        decode_lens = jnp.where(is_decode_row, batch.seq_lens, 0)
        decoded = self.kernels.mixed_decode(q[:num_rows], *pages, decode_lens, **options)
        # A decode row has one token, and stands first: row i is token i.
        return self.kernels.prefill(
            q,
            *pages,
            batch.seq_lens,
            batch.query_start_loc,
            batch.num_decode_rows,
            decoded,
            **options,
        )
