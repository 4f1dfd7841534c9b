"""Qwen3: Llama's wiring with a norm on each query and key head."""

from models.decoder import Decoder


class Qwen3ForCausalLM(Decoder):
    """`Qwen3ForCausalLM` of Hugging Face."""

    has_qk_norm = True
