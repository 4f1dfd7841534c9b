"""A decoder of the Llama shape: embedding, layers over the cache, final norm."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.attention import Attention
from models.batch import ForwardBatch
from models.config import ModelConfig
from models.kernels import Activation, ModelKernels
from models.kv_cache import KVCache, layer_places
from models.layers import Embedding, GatedMLP, RMSNorm
from models.loading.placements import Placement, decoder_placements
from models.rotary import inverse_frequencies, rotary_angles


class DecoderLayer(nnx.Module):
    """Attention and a gated MLP, each after a norm and added to the residual.

    A family that is wired differently names other parts, or overrides the call.

    Attributes:
      norm_class: of the norms over the hidden size.
      qk_norm_class: of a norm on each query and key head; None = there is none.
      activation: of the gate.
    """

    norm_class: type[RMSNorm] = RMSNorm
    qk_norm_class: type[RMSNorm] | None = None
    activation: Activation = "silu"

    def __init__(self, config: ModelConfig, *, dtype: str, kernels: ModelKernels, cache_group: int):
        self.input_layernorm = self.make_norm(config, dtype, kernels)
        self.self_attn = Attention(
            config,
            dtype=dtype,
            kernels=kernels,
            cache_group=cache_group,
            qk_norm_class=self.qk_norm_class,
        )
        self.post_attention_layernorm = self.make_norm(config, dtype, kernels)
        self.mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            dtype=dtype,
            kernels=kernels,
            bias=config.mlp_bias,
            activation=self.activation,
        )

    @classmethod
    def make_norm(cls, config: ModelConfig, dtype: str, kernels: ModelKernels) -> RMSNorm:
        """A norm over the hidden size."""
        eps = config.rms_norm_eps
        return cls.norm_class(config.hidden_size, eps=eps, dtype=dtype, kernels=kernels)

    def __call__(
        self,
        x: jax.Array,
        delta: jax.Array | None,
        batch: ForwardBatch,
        cache: KVCache,
        layer: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        rows: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, KVCache]:
        """Run the layer.

        Args:
          x: [T, D], the residual.
          delta: a sum of [T, D] that is still to be added to it; None before the first layer.
          batch: of this pass.
          cache: all groups.
          layer: int32[1], index of this layer within its cache group.
          angles: of the positions, as Attention takes them.
          rows: int32[R], the tokens that are needed after attention; None = all, R = T.

        Returns:
          The residual [R, D], what is still to be added to it, a sum of [R, D], and the cache.
        """
        x, qkv = self.self_attn.project(x, delta, self.input_layernorm)
        attended, cache = self.self_attn(qkv, batch, cache, layer, angles, rows)
        if rows is not None:
            x = x[rows]
        x, fed = self.mlp(x, attended, self.post_attention_layernorm)
        return x, fed, cache


@functools.partial(jax.jit, static_argnames=("graphdef",))
def _run_layer(graphdef, state, x, delta, batch, cache, layer, angles, rows):
    """One layer under its own jit: layers of equal structure are traced and lowered once.

    The first layer, which has no delta, and one that is given rows are traces of their own.
    """
    return nnx.merge(graphdef, state)(x, delta, batch, cache, layer, angles, rows)


class Decoder(nnx.Module):
    """Token ids to hidden states; the base of families that are wired like Llama.

    Attributes:
      layer_class: of the layers; its norm is the final one as well.
      embedding_class: of the tokens.
    """

    layer_class: type[DecoderLayer] = DecoderLayer
    embedding_class: type[Embedding] = Embedding

    def __init__(self, config: ModelConfig, *, dtype: str, kernels: ModelKernels):
        self.config = config
        self.places = layer_places(config)
        size = (config.vocab_size, config.hidden_size)
        self.embed_tokens = self.embedding_class(*size, dtype=dtype)
        self.layers = nnx.List(
            self.layer_class(config, dtype=dtype, kernels=kernels, cache_group=group)
            for group, _ in self.places
        )
        self.norm = self.layer_class.make_norm(config, dtype, kernels)
        self.lm_head = None if config.tie_word_embeddings else Embedding(*size, dtype=dtype)

    @staticmethod
    def placements(config: ModelConfig) -> tuple[Placement, ...]:
        """The names of one layer's weights in a checkpoint, and how they make its parameters."""
        return decoder_placements(config)

    @property
    def head_path(self) -> str:
        """Path of the parameter `[V, D]` that gives the logits."""
        return "embed_tokens.weight" if self.lm_head is None else "lm_head.weight"

    def __call__(self, batch: ForwardBatch, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Hidden states `[R, D]` of the batch's `logits_indices`, normalised, and the new cache.

        After the last layer's attention only these tokens are computed.
        """
        x, delta = self._embed(batch), None
        angles = rotary_angles(
            batch.positions[0],
            inverse_frequencies(self.config),
            self.config.rope_scaling.attention_factor,
        )
        needed: list[jax.Array | None] = [None] * len(self.layers)
        if not batch.is_decode_only:  # else a row is a token
            needed[-1] = batch.logits_indices
        for layer, (_, index), rows in zip(self.layers, self.places, needed, strict=True):
            graphdef, state = nnx.split(layer)
            layer_index = jnp.asarray(np.array([index], np.int32))
            x, delta, cache = _run_layer(
                graphdef, state, x, delta, batch, cache, layer_index, angles, rows
            )
        return self.norm.add(x, delta)[1], cache

    def _embed(self, batch: ForwardBatch) -> jax.Array:
        x = self.embed_tokens(batch.token_ids)
        if batch.inputs_embeds is None or batch.inputs_embeds_mask is None:
            return x
        return jnp.where(batch.inputs_embeds_mask[:, None], batch.inputs_embeds.astype(x.dtype), x)
