"""Phi-3 and Phi-4-mini: Llama's wiring; the checkpoint fuses q, k, v, and gate, up."""

import numpy as np

from models.config import ModelConfig
from models.decoder import Decoder
from models.loading.pieces import Piece
from models.loading.placements import Placement, decoder_placements, fuse_gate_up, fuse_qkv


class Phi3ForCausalLM(Decoder):
    """`Phi3ForCausalLM` of Hugging Face."""

    @staticmethod
    def placements(config: ModelConfig) -> tuple[Placement, ...]:
        """Llama's, with the two fused tensors in place of their parts."""
        query_rows = config.num_attention_heads * config.head_dim
        key_rows = config.num_key_value_heads // config.kv_head_copies * config.head_dim

        def split_qkv(rows: np.ndarray) -> tuple[Piece, ...]:
            return fuse_qkv(config, *np.split(rows, [query_rows, query_rows + key_rows]))

        def split_gate_up(rows: np.ndarray) -> tuple[Piece, ...]:
            return fuse_gate_up(*np.split(rows, 2))

        fused = {
            "self_attn.qkv_proj.weight": split_qkv,
            "mlp.gate_up_proj.weight": split_gate_up,
        }
        others = (p for p in decoder_placements(config) if p.target not in fused)
        return (*others, *(Placement(name, (name,), split) for name, split in fused.items()))
