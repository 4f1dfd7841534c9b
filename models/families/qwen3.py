"""Qwen3: Llama's wiring with a norm on each query and key head."""

from models.decoder import Decoder, DecoderLayer
from models.layers import RMSNorm


class Qwen3Layer(DecoderLayer):
    """A layer whose query and key heads are normalised before they are rotated."""

    qk_norm_class = RMSNorm


class Qwen3ForCausalLM(Decoder):
    """`Qwen3ForCausalLM` of Hugging Face."""

    layer_class = Qwen3Layer
