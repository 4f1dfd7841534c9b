"""Gemma 2: norms before and after each part, by 1 + weight; scaled embeddings; GELU."""

import jax

from models.attention_kernels import AttentionKernels
from models.batch import ForwardBatch
from models.config import ModelConfig
from models.decoder import Decoder, DecoderLayer
from models.kv_cache import KVCache
from models.layers import OffsetRMSNorm, ScaledEmbedding, gelu_tanh


class Gemma2Layer(DecoderLayer):
    """A layer that also normalises what attention and the MLP give, before it is added."""

    norm_class = OffsetRMSNorm
    activation = staticmethod(gelu_tanh)

    def __init__(
        self, config: ModelConfig, *, dtype: str, kernels: AttentionKernels, cache_group: int
    ):
        super().__init__(config, dtype=dtype, kernels=kernels, cache_group=cache_group)
        self.pre_feedforward_layernorm = self.make_norm(config, dtype)
        self.post_feedforward_layernorm = self.make_norm(config, dtype)

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
        x = x + self.post_attention_layernorm(attended)
        fed = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(fed), cache


class Gemma2ForCausalLM(Decoder):
    """`Gemma2ForCausalLM` of Hugging Face."""

    layer_class = Gemma2Layer
    embedding_class = ScaledEmbedding
