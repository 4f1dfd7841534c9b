"""A decoder of the Llama shape: embedding, layers over the cache, final norm."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.attention import Attention, AttentionKernels
from models.batch import ForwardBatch
from models.config import ModelConfig
from models.kv_cache import KVCache
from models.layers import Embedding, GatedMLP, RMSNorm
from models.rotary import inverse_frequencies, rotary_angles


class DecoderLayer(nnx.Module):
    """Attention and a gated MLP, each after a norm and added to the residual."""

    def __init__(
        self, config: ModelConfig, *, dtype: str, kernels: AttentionKernels, has_qk_norm: bool
    ):
        norm = functools.partial(RMSNorm, config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.input_layernorm = norm()
        self.self_attn = Attention(config, dtype=dtype, kernels=kernels, has_qk_norm=has_qk_norm)
        self.post_attention_layernorm = norm()
        self.mlp = GatedMLP(
            config.hidden_size, config.intermediate_size, dtype=dtype, bias=config.mlp_bias
        )

    def __call__(
        self,
        x: jax.Array,
        batch: ForwardBatch,
        cache: KVCache,
        layer: jax.Array,
        angles: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, KVCache]:
        """[T, D] -> [T, D]; the other arguments are those of Attention."""
        attended, cache = self.self_attn(self.input_layernorm(x), batch, cache, layer, angles)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), cache


@functools.partial(jax.jit, static_argnames=("graphdef",))
def _run_layer(graphdef, state, x, batch, cache, layer, angles):
    """One layer under its own jit: layers of equal structure are traced and lowered once."""
    return nnx.merge(graphdef, state)(x, batch, cache, layer, angles)


class Decoder(nnx.Module):
    """Token ids to hidden states; the base of families that are wired like Llama."""

    has_qk_norm = False

    def __init__(self, config: ModelConfig, *, dtype: str, kernels: AttentionKernels):
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nnx.List(
            DecoderLayer(config, dtype=dtype, kernels=kernels, has_qk_norm=self.has_qk_norm)
            for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        )

    @property
    def head_path(self) -> str:
        """Path of the parameter `[V, D]` that gives the logits."""
        return "embed_tokens.weight" if self.lm_head is None else "lm_head.weight"

    def __call__(self, batch: ForwardBatch, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Hidden states `[R, D]` of the batch's `logits_indices`, normalised, and the new cache."""
        x = self._embed(batch)
        angles = rotary_angles(batch.positions[0], inverse_frequencies(self.config))
        for index, layer in enumerate(self.layers):
            graphdef, state = nnx.split(layer)
            layer_index = jnp.asarray(np.array([index], np.int32))
            x, cache = _run_layer(graphdef, state, x, batch, cache, layer_index, angles)
        return self.norm(x[batch.logits_indices]), cache

    def _embed(self, batch: ForwardBatch) -> jax.Array:
        x = self.embed_tokens(batch.token_ids)
        if batch.inputs_embeds is None or batch.inputs_embeds_mask is None:
            return x
        return jnp.where(batch.inputs_embeds_mask[:, None], batch.inputs_embeds.astype(x.dtype), x)
