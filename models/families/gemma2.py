"""Gemma 2: norms before and after each part, by 1 + weight; scaled embeddings; GELU."""

import jax

from models.batch import ForwardBatch
from models.config import ModelConfig
from models.decoder import Decoder, DecoderLayer
from models.kernels import ModelKernels
from models.kv_cache import KVCache
from models.layers import OffsetRMSNorm, ScaledEmbedding
from pallas_kernels.fused.fused_inputs import total


class Gemma2Layer(DecoderLayer):
    """A layer that also normalises what attention and the MLP give, before it is added."""

    norm_class = OffsetRMSNorm
    activation = "gelu_tanh"

    def __init__(self, config: ModelConfig, *, dtype: str, kernels: ModelKernels, cache_group: int):
        super().__init__(config, dtype=dtype, kernels=kernels, cache_group=cache_group)
        self.pre_feedforward_layernorm = self.make_norm(config, dtype, kernels)
        self.post_feedforward_layernorm = self.make_norm(config, dtype, kernels)

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
        """As in DecoderLayer."""
        x, qkv = self.self_attn.project(x, delta, self.input_layernorm)
        attended, cache = self.self_attn(qkv, batch, cache, layer, angles, rows)
        if rows is not None:
            x = x[rows]
        x, fed = self.mlp(
            x, attended, self.pre_feedforward_layernorm, self.post_attention_layernorm
        )
        return x, self.post_feedforward_layernorm(total(fed, x.ndim, x.dtype)), cache


class Gemma2ForCausalLM(Decoder):
    """`Gemma2ForCausalLM` of Hugging Face."""

    layer_class = Gemma2Layer
    embedding_class = ScaledEmbedding
