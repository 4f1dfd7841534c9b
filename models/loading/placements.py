"""Placements: which tensors of a checkpoint make up which parameter, and how."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from models.config import ModelConfig
from models.loading.pieces import Piece, whole

Assemble = Callable[..., tuple[Piece, ...]]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a checkpoint tensor goes.

    Attributes:
      target: the parameter, within its layer.
      parts: checkpoint names whose tensors make up the parameter, in `assemble`'s order.
      assemble: arrays of the parts -> views of them that are the parameter; reads no value.
    """

    target: str
    parts: tuple[str, ...]
    assemble: Assemble


def fuse_qkv(config: ModelConfig, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[Piece, ...]:
    """Rows of all heads, [heads * H, D] each -> [D, K, G + 2, H]."""
    H, K, G = config.head_dim, config.num_key_value_heads, config.num_query_heads_per_kv_head
    C = config.kv_head_copies
    pieces = [Piece((0, 0, 0, 0), _split_rows(q, K, G, H))]
    for place, rows in ((G, k), (G + 1, v)):
        heads = _split_rows(rows, K // C, 1, H)
        for head in range(K):
            source = head // C
            pieces.append(Piece((0, head, place, 0), heads[:, source : source + 1]))
    return tuple(pieces)


def fuse_gate_up(gate: np.ndarray, up: np.ndarray) -> tuple[Piece, ...]:
    """[F, D] each -> [D, 2, F]."""
    return tuple(
        Piece((0, place, 0), _split_rows(rows, 1, len(rows)))
        for place, rows in enumerate((gate, up))
    )


def decoder_placements(config: ModelConfig) -> tuple[Placement, ...]:
    """The tensors of one layer of a Llama-shaped checkpoint; weights there are [out, in]."""
    H, K = config.head_dim, config.num_key_value_heads
    G = config.num_query_heads_per_kv_head

    def fuse_weights(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[Piece, ...]:
        return fuse_qkv(config, q, k, v)

    def fuse_biases(*biases: np.ndarray) -> tuple[Piece, ...]:
        return _first_row(fuse_qkv(config, *map(_as_column, biases)))

    def stack_biases(*biases: np.ndarray) -> tuple[Piece, ...]:
        return _first_row(fuse_gate_up(*map(_as_column, biases)))

    def output(o: np.ndarray) -> tuple[Piece, ...]:
        return whole(_split_rows(o.T, K, G, H).transpose(1, 2, 3, 0))

    qkv = tuple(f"self_attn.{name}_proj" for name in "qkv")
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    weights = (
        Placement("self_attn.qkv_proj.weight", _suffixed(qkv, "weight"), fuse_weights),
        Placement("self_attn.o_proj.weight", ("self_attn.o_proj.weight",), output),
        Placement("mlp.gate_up_proj.weight", _suffixed(gate_up, "weight"), fuse_gate_up),
        Placement("mlp.down_proj.weight", ("mlp.down_proj.weight",), lambda x: whole(x.T)),
        Placement("self_attn.qkv_proj.bias", _suffixed(qkv, "bias"), fuse_biases),
        Placement("mlp.gate_up_proj.bias", _suffixed(gate_up, "bias"), stack_biases),
    )
    kept = ("input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_norm.weight")
    kept += ("self_attn.k_norm.weight", "self_attn.o_proj.bias", "mlp.down_proj.bias")
    return weights + tuple(Placement(name, (name,), whole) for name in kept)


def _split_rows(x: np.ndarray, *axes: int) -> np.ndarray:
    """[rows, D] -> a view [D, *axes]; the rows must be theirs, or a transpose would pass."""
    rows = math.prod(axes)
    if x.ndim != 2 or len(x) != rows:
        raise ValueError(f"must have {rows} rows; got shape {x.shape}")
    split = x.reshape(*axes, x.shape[1], copy=False)
    return np.moveaxis(split, -1, 0)


def _as_column(bias: np.ndarray) -> np.ndarray:
    return bias[:, None]


def _first_row(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Pieces without their first axis, of size 1."""
    return tuple(Piece(piece.start[1:], piece.values[0]) for piece in pieces)


def _suffixed(names: tuple[str, ...], suffix: str) -> tuple[str, ...]:
    return tuple(f"{name}.{suffix}" for name in names)
