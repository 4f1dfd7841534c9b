"""Placements: which tensors of a checkpoint make up which parameter, and how."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from models.config import ModelConfig

Assemble = Callable[..., np.ndarray]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a checkpoint tensor goes.

    Attributes:
      target: the parameter, within its layer.
      parts: checkpoint names whose tensors make up the parameter, in `assemble`'s order.
      assemble: host arrays of the parts -> the parameter.
    """

    target: str
    parts: tuple[str, ...]
    assemble: Assemble


def fuse_qkv(config: ModelConfig, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Rows of all heads, [heads * H, D] each (or [heads * H]) -> [D, K, G + 2, H] (D = 1)."""
    H, K, G = config.head_dim, config.num_key_value_heads, config.num_query_heads_per_kv_head
    C = config.kv_head_copies
    k, v = (np.repeat(_split_rows(x, K // C, 1, H), C, axis=0) for x in (k, v))
    return np.concatenate([_split_rows(q, K, G, H), k, v], axis=1).transpose(3, 0, 1, 2)


def fuse_gate_up(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """[F, D] each -> [D, 2, F]."""
    return np.stack([gate, up], axis=0).transpose(2, 0, 1)


def decoder_placements(config: ModelConfig) -> tuple[Placement, ...]:
    """The tensors of one layer of a Llama-shaped checkpoint; weights there are [out, in]."""
    H, K = config.head_dim, config.num_key_value_heads
    G = config.num_query_heads_per_kv_head

    def fuse_weights(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        return fuse_qkv(config, q, k, v)

    def fuse_biases(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        return fuse_qkv(config, q, k, v)[0]

    def output(o: np.ndarray) -> np.ndarray:
        return _split_rows(o.T, K, G, H)

    def same(x: np.ndarray) -> np.ndarray:
        return x

    qkv = tuple(f"self_attn.{name}_proj" for name in "qkv")
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    weights = (
        Placement("self_attn.qkv_proj.weight", _suffixed(qkv, "weight"), fuse_weights),
        Placement("self_attn.o_proj.weight", ("self_attn.o_proj.weight",), output),
        Placement("mlp.gate_up_proj.weight", _suffixed(gate_up, "weight"), fuse_gate_up),
        Placement("mlp.down_proj.weight", ("mlp.down_proj.weight",), np.transpose),
        Placement("self_attn.qkv_proj.bias", _suffixed(qkv, "bias"), fuse_biases),
        Placement("mlp.gate_up_proj.bias", _suffixed(gate_up, "bias"), lambda *b: np.stack(b)),
    )
    kept = ("input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_norm.weight")
    kept += ("self_attn.k_norm.weight", "self_attn.o_proj.bias", "mlp.down_proj.bias")
    return weights + tuple(Placement(name, (name,), same) for name in kept)


def _split_rows(x: np.ndarray, *axes: int) -> np.ndarray:
    """[rows, ...] -> [*axes, -1]; the rows must be theirs, or a transposed tensor would pass."""
    if len(x) != math.prod(axes):
        raise ValueError(f"must have {math.prod(axes)} rows; got shape {x.shape}")
    return x.reshape(*axes, -1)


def _suffixed(names: tuple[str, ...], suffix: str) -> tuple[str, ...]:
    return tuple(f"{name}.{suffix}" for name in names)
