"""Reads a GGUF file's keys as the numbers of Hugging Face's config.json."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from models.loading.gguf_header import TensorInfo
from models.loading.gguf_metadata import GgufMetadata

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""`general.architecture` -> the name in config.json."""

_APPLIED_KEYS = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "rope.freq_base",
    "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
})  # fmt: skip
_INERT_KEYS = frozenset({
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "tensor_data_layout",
    "expert_used_count", "pooling_type",
})  # fmt: skip
_FIXED_KEYS: dict[str, int | bool] = {
    "expert_count": 0,
    "attention.causal": True,
    "attention.sliding_window": 0,
    "use_parallel_residual": False,
}
"""Accepted with this one value, since any other asks for what is not built."""


_MAX_LAYERS = 1024


class ConfigReader:
    """Turns the keys of one model into a config dictionary."""

    def __init__(self, metadata: GgufMetadata, tensors: Mapping[str, TensorInfo]):
        """Find the architecture.

        Args:
          metadata: keys of the (first) file.
          tensors: of all parts, by GGUF name.

        Raises:
          ModelLoadError: the architecture is not known, or has settings that nobody here reads.
        """
        self._metadata, self._tensors = metadata, tensors
        architecture = metadata.string("general.architecture")
        if architecture is None or architecture not in ARCHITECTURES:
            rule = f"must be one of {', '.join(ARCHITECTURES)}"
            metadata.refuse("general.architecture", f"{rule}; got {architecture!r}")
        self.architecture = architecture
        self._check_settings()

    def config_dict(self, rope_factors: np.ndarray | None) -> dict[str, Any]:
        """The config.

        Args:
          rope_factors: the values of rope_freqs.weight, None where the file has none.
        """
        heads = self._size("attention.head_count")
        hidden = self._size("embedding_length")
        head_dim = self._size("attention.key_length", hidden // heads)
        for name in ("attention.value_length", "rope.dimension_count"):
            if self._size(name, head_dim) != head_dim:
                self._metadata.refuse(self._key(name), f"must be the head dim {head_dim}")
        end_ids = self._metadata.end_token_ids
        return {
            "architectures": [ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "num_hidden_layers": self._size("block_count", high=_MAX_LAYERS),
            "num_attention_heads": heads,
            "num_key_value_heads": self._size("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "intermediate_size": self._size("feed_forward_length"),
            "vocab_size": self._vocab_size(),
            "rms_norm_eps": self._rms_norm_eps(),
            "rope_theta": self._metadata.number(self._key("rope.freq_base")) or 10000.0,
            "rope_scaling": self._rope_scaling(rope_factors, head_dim),
            "max_position_embeddings": self._size("context_length"),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in self._tensors,
            "eos_token_id": end_ids[0] if len(end_ids) == 1 else list(end_ids) or None,
            "bos_token_id": self._metadata.token_id("bos_token_id"),
            "dtype": self._dtype(),
        }

    def _check_settings(self) -> None:
        """Refuse settings that would change the result and that nobody here reads."""
        prefix = self._key("")
        for key, value in self._metadata.values.items():
            name = key.removeprefix(prefix)
            if name == key or name in _APPLIED_KEYS or name in _INERT_KEYS:
                continue
            if name not in _FIXED_KEYS:
                self._metadata.refuse(key, "this setting is not supported")
            fixed = _FIXED_KEYS[name]
            if type(value) is not type(fixed) or value != fixed:
                self._metadata.refuse(key, f"must be {fixed}; got {value!r}")

    def _key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def _size(self, name: str, default: int | None = None, high: int = 1 << 30) -> int:
        value = self._metadata.integer(self._key(name))
        value = default if value is None else value
        if value is None or not 1 <= value <= high:
            self._metadata.refuse(self._key(name), f"must be in [1, {high}]; got {value}")
        return value

    def _vocab_size(self) -> int:
        if "token_embd.weight" not in self._tensors:
            self._metadata.refuse("token_embd.weight", "the tensor is missing")
        num_rows = self._tensors["token_embd.weight"].shape[0]
        declared = self._size("vocab_size", num_rows)
        if declared != num_rows:
            rule = f"must be the {num_rows} rows of token_embd.weight"
            self._metadata.refuse(self._key("vocab_size"), f"{rule}; got {declared}")
        return num_rows

    def _rms_norm_eps(self) -> float:
        key = self._key("attention.layer_norm_rms_epsilon")
        epsilon = self._metadata.number(key)
        if epsilon is None:
            self._metadata.refuse(key, "the key is missing")
        return float(str(np.float32(epsilon)))  # 1e-05 as in config.json, not 9.99999974e-06

    def _rope_scaling(self, factors: np.ndarray | None, head_dim: int) -> dict[str, Any] | None:
        old_factor = self._metadata.number(self._key("rope.scale_linear")) or 1.0
        kind = self._metadata.string(self._key("rope.scaling.type"))
        kind = kind or ("none" if old_factor == 1.0 else "linear")
        if kind not in ("none", "linear"):
            rule = "must be none or linear in this release"
            self._metadata.refuse(self._key("rope.scaling.type"), f"{rule}; got {kind!r}")
        factor = self._metadata.number(self._key("rope.scaling.factor")) or old_factor
        if factors is None:
            return {"rope_type": "linear", "factor": factor} if kind == "linear" else None
        if kind == "linear":
            self._metadata.refuse("rope_freqs.weight", "must not stand beside linear scaling")
        if factors.shape != (head_dim // 2,) or not np.isfinite(factors).all() or min(factors) <= 0:
            rule = f"must be {head_dim // 2} finite values above 0"
            self._metadata.refuse("rope_freqs.weight", rule)
        return {"rope_type": "frequency_factors", "frequency_factors": factors.tolist()}

    def _dtype(self) -> str:
        """What to compute in: the file's own type, bfloat16 for quantised and mixed ones."""
        types = {info.type_name for info in self._tensors.values() if len(info.shape) > 1}
        return "float32" if types == {"F32"} else "float16" if types == {"F16"} else "bfloat16"
