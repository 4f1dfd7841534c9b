"""Mistral: Llama's wiring; every layer may have a sliding window, which the config settles."""

from models.decoder import Decoder


class MistralForCausalLM(Decoder):
    """`MistralForCausalLM` of Hugging Face."""
