"""Llama 2 and 3, and what is wired like them (SmolLM2)."""

from models.decoder import Decoder


class LlamaForCausalLM(Decoder):
    """`LlamaForCausalLM` of Hugging Face."""
