"""Host arrays in the place of a checkpoint's tensors, and the plain meaning of the placements."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from models.config import ModelConfig
from models.loading.pieces import ParameterPieces, whole
from models.loading.stored_tensor import StoredTensor


def stored(array: np.ndarray) -> StoredTensor:
    return StoredTensor(array.shape, array.dtype, lambda: array)


def all_stored(arrays: Mapping[str, np.ndarray]) -> list[tuple[str, StoredTensor]]:
    return [(name, stored(array)) for name, array in arrays.items()]


def one_piece(array: np.ndarray) -> ParameterPieces:
    return ParameterPieces(whole(array))


def read_folder(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, by the safetensors package."""
    return {n: x for path in folder.glob("*.safetensors") for n, x in load_file(path).items()}


def plain_parameter(
    config: ModelConfig, tensors: Mapping[str, np.ndarray], path: str
) -> np.ndarray:
    """A parameter put together from whole tensors."""
    parent, name, kind = ("." + path).rsplit(".", 2)
    prefix = "" if name == "lm_head" else f"model{parent}."

    def part(name: str) -> np.ndarray:
        return tensors[f"{prefix}{name}.{kind}"]

    is_fused = f"{prefix}{name}.{kind}" in tensors
    if name == "gate_up_proj":
        gate_up = np.split(part(name), 2) if is_fused else (part("gate_proj"), part("up_proj"))
        return _with_inputs_first(np.stack(gate_up), kind)
    if name == "qkv_proj":
        qkv = (
            _split_qkv(config, part(name))
            if is_fused
            else map(part, ("q_proj", "k_proj", "v_proj"))
        )
        return _with_inputs_first(_plain_qkv(config, *qkv), kind)
    if name == "o_proj" and kind == "weight":
        K, G = config.num_key_value_heads, config.num_query_heads_per_kv_head
        return part(name).T.reshape(K, G, config.head_dim, -1)
    return part(name).T if name == "down_proj" else part(name)


def _split_qkv(config: ModelConfig, rows: np.ndarray) -> list[np.ndarray]:
    K, G, H = config.num_key_value_heads, config.num_query_heads_per_kv_head, config.head_dim
    key_rows = K // config.kv_head_copies * H
    return np.split(rows, [K * G * H, K * G * H + key_rows])


def _plain_qkv(config: ModelConfig, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """[K, G + 2, H, ...]."""
    H, K, G = config.head_dim, config.num_key_value_heads, config.num_query_heads_per_kv_head
    copies = config.kv_head_copies
    k, v = (x.reshape(K // copies, 1, H, *x.shape[1:]) for x in (k, v))
    k, v = (np.repeat(x, copies, axis=0) for x in (k, v))
    return np.concatenate([q.reshape(K, G, H, *q.shape[1:]), k, v], axis=1)


def _with_inputs_first(x: np.ndarray, kind: str) -> np.ndarray:
    return np.moveaxis(x, -1, 0) if kind == "weight" else x
