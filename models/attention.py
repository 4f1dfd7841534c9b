"""Attention over a cache group: projections, rotary embedding, the write, and the right kernel."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from models.attention_kernels import AttentionKernels
from models.batch import ForwardBatch
from models.config import ModelConfig
from models.kv_cache import CacheGroup, KVCache
from models.layers import DenseFormat, Linear, RMSNorm
from models.rotary import rotate


class Attention(nnx.Module):
    """Grouped-query attention with a fused qkv weight `[D, K, G + 2, H]`."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: str,
        kernels: AttentionKernels,
        cache_group: int,
        qk_norm_class: type[RMSNorm] | None = None,
    ):
        D, H = config.hidden_size, config.head_dim
        K, G = config.num_key_value_heads, config.num_query_heads_per_kv_head
        weight_format = DenseFormat(dtype)
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
            and qk_norm_class(H, eps=config.rms_norm_eps, dtype=dtype, axis="head_dim")
            for _ in "qk"
        )

    def __call__(
        self,
        x: jax.Array,
        batch: ForwardBatch,
        cache: KVCache,
        layer: jax.Array,
        angles: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, KVCache]:
        """Attend.

        Args:
          x: [T, D], normalised hidden states.
          batch: of this pass.
          cache: all groups.
          layer: int32[1], index of this layer within its cache group.
          angles: cosine and sine of the positions, float32[T, 1, rotary_dim / 2].

        Returns:
          [T, D], and the cache with this step's keys and values.
        """
        q, k, v = self._project(x, angles)
        group = self._write(cache.groups[self.cache_group], layer, batch, k, v)
        out = self._attend(q, group, layer, batch)
        T, _, H = q.shape
        K = k.shape[1]
        out = self.o_proj(out[..., :H].reshape(T, K, -1, H))
        return out, cache.with_group(self.cache_group, group)

    def _project(
        self, x: jax.Array, angles: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        qkv = self.qkv_proj(x)  # [T, K, G + 2, H]
        T, _, _, H = qkv.shape
        q, k, v = qkv[:, :, :-2].reshape(T, -1, H), qkv[:, :, -2], qkv[:, :, -1]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, *angles), rotate(k, *angles), v

    def _write(
        self, group: CacheGroup, layer: jax.Array, batch: ForwardBatch, k: jax.Array, v: jax.Array
    ) -> CacheGroup:
        """[T, K, H] keys and values, padded to the stored head dim, into their slots."""
        slots = batch.slot_mapping[self.cache_group]
        missing = group.geometry.stored_head_dim - k.shape[-1]
        k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, missing))) for x in (k, v))
        return replace(
            group,
            k_pages=self.kernels.write(group.k_pages, layer, slots, k),
            v_pages=self.kernels.write(group.v_pages, layer, slots, v),
        )

    def _attend(
        self, q: jax.Array, group: CacheGroup, layer: jax.Array, batch: ForwardBatch
    ) -> jax.Array:
        """[T, N, H] -> [T, N, stored_head_dim]: decode rows by one kernel, chunks by the other."""
        geometry = group.geometry
        q = jnp.pad(q, ((0, 0), (0, 0), (0, geometry.stored_head_dim - q.shape[-1])))
        pages = (group.k_pages, group.v_pages, layer, batch.page_tables[self.cache_group])
        options = dict(
            scale=self.scale, sliding_window=geometry.sliding_window, soft_cap=self.soft_cap
        )
        num_rows = batch.seq_lens.shape[0]
        if batch.is_decode_only:
            return self.kernels.decode(q, *pages, batch.seq_lens, **options)
        is_decode_row = jnp.arange(num_rows) < batch.num_decode_rows
        decode_lens = jnp.where(is_decode_row, batch.seq_lens, 0)
        decoded = self.kernels.decode(q[:num_rows], *pages, decode_lens, **options)
        prefilled = self.kernels.prefill(
            q, *pages, batch.seq_lens, batch.query_start_loc, batch.num_decode_rows, **options
        )
        # A decode row has one token, and stands first: row i is token i.
        head = jnp.where(is_decode_row[:, None, None], decoded, prefilled[:num_rows])
        return jnp.concatenate([head, prefilled[num_rows:]])
