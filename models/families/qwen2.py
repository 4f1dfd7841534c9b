"""Qwen2 and Qwen2.5: Llama's wiring; q, k and v have a bias, which the config settles."""

from models.decoder import Decoder


class Qwen2ForCausalLM(Decoder):
    """`Qwen2ForCausalLM` of Hugging Face."""
