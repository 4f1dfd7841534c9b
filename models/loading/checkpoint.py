"""From a checkpoint's named tensors to a model's parameters: renaming, fusing, refusing."""

import fnmatch
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from models.config import ModelConfig
from models.errors import ModelLoadError
from models.weight_layout import WeightStore

Assemble = Callable[..., np.ndarray]

DANGEROUS_IF_UNUSED = ("*scale*", "*zero*", "*g_idx*", "*bias*", "*norm*")
"""Tensors that change the result: one that no parameter takes is an error, never skipped."""
IGNORED = ("*.rotary_emb.inv_freq", "rope_freqs.weight")


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


def decoder_placements(config: ModelConfig) -> tuple[Placement, ...]:
    """The tensors of one layer of a Llama-shaped checkpoint; weights there are [out, in]."""
    D, H = config.hidden_size, config.head_dim
    K, G = config.num_key_value_heads, config.num_query_heads_per_kv_head

    def fuse_qkv(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        heads = [q.reshape(K, G, H, -1), k.reshape(K, 1, H, -1), v.reshape(K, 1, H, -1)]
        return np.concatenate(heads, axis=1).transpose(3, 0, 1, 2)

    def fuse_qkv_bias(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        return fuse_qkv(q, k, v)[0]

    def fuse_gate_up(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        return np.stack([gate, up], axis=0).transpose(2, 0, 1)

    def output(o: np.ndarray) -> np.ndarray:
        return o.T.reshape(K, G, H, D)

    def same(x: np.ndarray) -> np.ndarray:
        return x

    qkv = tuple(f"self_attn.{name}_proj" for name in "qkv")
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    weights = (
        Placement("self_attn.qkv_proj.weight", _suffixed(qkv, "weight"), fuse_qkv),
        Placement("self_attn.o_proj.weight", ("self_attn.o_proj.weight",), output),
        Placement("mlp.gate_up_proj.weight", _suffixed(gate_up, "weight"), fuse_gate_up),
        Placement("mlp.down_proj.weight", ("mlp.down_proj.weight",), np.transpose),
        Placement("self_attn.qkv_proj.bias", _suffixed(qkv, "bias"), fuse_qkv_bias),
        Placement("mlp.gate_up_proj.bias", _suffixed(gate_up, "bias"), lambda *b: np.stack(b)),
    )
    kept = ("input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_norm.weight")
    kept += ("self_attn.k_norm.weight", "self_attn.o_proj.bias", "mlp.down_proj.bias")
    return weights + tuple(Placement(name, (name,), same) for name in kept)


def _suffixed(names: tuple[str, ...], suffix: str) -> tuple[str, ...]:
    return tuple(f"{name}.{suffix}" for name in names)


class CheckpointLoader:
    """Feeds tensors to a WeightStore; holds the parts of at most a few fused weights at a time."""

    def __init__(self, config: ModelConfig, store: WeightStore):
        self._store = store
        self._is_tied = config.tie_word_embeddings
        self._placement_of = {
            part: placement for placement in decoder_placements(config) for part in placement.parts
        }
        self._waiting: dict[str, dict[str, np.ndarray]] = {}
        self._unused: list[str] = []
        self._tied_head: np.ndarray | None = None

    def load(self, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        """Put every tensor where it belongs.

        Raises:
          ModelLoadError: a tensor has the wrong shape, a needed one is missing, one that would
            change the result has no place, or the head of tied embeddings is not the embedding.
        """
        for name, tensor in tensors:
            self._place(name, tensor)
        if self._store.missing:
            names = self._missing_tensors()
            raise ModelLoadError(
                f"the checkpoint must hold every tensor of the model; missing are "
                f"{len(names)}, among them {', '.join(names[:4])}"
            )
        self._check_tied_head()
        if self._unused:
            warnings.warn(f"unused tensors in the checkpoint: {self._unused}", stacklevel=2)

    def _place(self, name: str, tensor: np.ndarray) -> None:
        if name == "lm_head.weight" and self._is_tied:
            self._tied_head = tensor
            return
        layer, placement = self._find(name)
        target = layer + placement.target if placement else name.removeprefix("model.")
        if not self._store.expects(target):
            self._refuse_or_note(name)
        elif placement is None:
            self._put(target, name, lambda: tensor)
        else:
            parts = self._waiting.setdefault(target, {})
            parts[name.removeprefix(f"model.{layer}")] = tensor
            if len(parts) == len(placement.parts):
                del self._waiting[target]
                ordered = [parts[part] for part in placement.parts]
                self._put(target, name, lambda: placement.assemble(*ordered))

    def _find(self, name: str) -> tuple[str, Placement | None]:
        match = re.fullmatch(r"model\.(layers\.\d+\.)(.+)", name)
        if match is None:
            return "", None
        return match[1], self._placement_of.get(match[2])

    def _put(self, target: str, name: str, make: Callable[[], np.ndarray]) -> None:
        try:
            self._store.put(target, make())
        except ValueError as error:
            raise ModelLoadError(f"{name}: its shape must fit the config; {error}") from error

    def _missing_tensors(self) -> list[str]:
        """The missing parameters under their checkpoint names, part by part."""
        parts_of = {p.target: p.parts for p in self._placement_of.values()}
        names = []
        for path in self._store.missing:
            layer, target = re.fullmatch(r"(layers\.\d+\.)?(.+)", path).groups("")  # pyright: ignore[reportOptionalMemberAccess]
            prefix = "" if path.startswith("lm_head.") else f"model.{layer}"
            parts = parts_of.get(target, (target,)) if layer else (target,)
            found = self._waiting.get(path, {})
            names += [prefix + part for part in parts if part not in found]
        return names

    def _check_tied_head(self) -> None:
        """Transformers ties no head that differs, whatever the config says; we refuse it."""
        head, self._tied_head = self._tied_head, None
        if head is not None and not self._store.holds("embed_tokens.weight", head):
            raise ModelLoadError(
                "lm_head.weight: must equal model.embed_tokens.weight, since the config has "
                "tie_word_embeddings true; it differs; set tie_word_embeddings to false"
            )

    def _refuse_or_note(self, name: str) -> None:
        if any(fnmatch.fnmatch(name, pattern) for pattern in IGNORED):
            return
        if any(fnmatch.fnmatch(name, pattern) for pattern in DANGEROUS_IF_UNUSED):
            raise ModelLoadError(
                f"{name}: the architecture must have a parameter for it; it has not"
            )
        self._unused.append(name)
