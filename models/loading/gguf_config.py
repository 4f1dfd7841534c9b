"""Reads a GGUF file's keys as the numbers of Hugging Face's config.json."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from models.loading.gguf_header import TensorInfo
from models.loading.gguf_metadata import GgufMetadata

ARCHITECTURES = {
    "gemma2": "Gemma2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
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
_OWN_KEYS: dict[str, frozenset[str]] = {
    "gemma2": frozenset({
        "attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping",
    }),
    "phi3": frozenset({"attention.sliding_window", "rope.scaling.attn_factor"}),
}  # fmt: skip
"""Read for one architecture, refused for the others."""
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors whose values belong to the config."""

_MAX_LAYERS = 1024
_GEMMA2_27B_LAYERS = 46


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

    def config_dict(self, rope_factors: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """The config.

        Args:
          rope_factors: the values of those of `ROPE_FACTORS` that the file has.
        """
        heads = self._size("attention.head_count")
        hidden = self._size("embedding_length")
        head_dim = self._size("attention.key_length", hidden // heads)
        rotary_dim = self._size("rope.dimension_count", head_dim)
        whole = {"attention.value_length": self._size("attention.value_length", head_dim)}
        if self.architecture != "phi3":
            whole["rope.dimension_count"] = rotary_dim
        for name, size in whole.items():
            if size != head_dim:
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
            "rope_scaling": self._rope_scaling(rope_factors, rotary_dim),
            "max_position_embeddings": self._size("context_length"),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in self._tensors,
            "eos_token_id": end_ids[0] if len(end_ids) == 1 else list(end_ids) or None,
            "bos_token_id": self._metadata.token_id("bos_token_id"),
            "dtype": self._dtype(),
        } | self._own_numbers(hidden // heads, head_dim, rotary_dim)

    def _own_numbers(self, mean_head_dim: int, head_dim: int, rotary_dim: int) -> dict[str, Any]:
        """What only this architecture has; where a key is absent, transformers' default holds."""
        window = self._metadata.integer(self._key("attention.sliding_window"))
        if self.architecture == "phi3":
            length = self._metadata.integer(self._key("rope.scaling.original_context_length"))
            numbers = {"original_max_position_embeddings": length, "sliding_window": window or None}
            return numbers | {"partial_rotary_factor": rotary_dim / head_dim}
        if self.architecture == "gemma2":
            is_27b = self._size("block_count") == _GEMMA2_27B_LAYERS  # as llama.cpp tells it
            caps = ("attn_logit_softcapping", "final_logit_softcapping")
            numbers = {name: self._metadata.number(self._key(name)) for name in caps}
            numbers |= {"sliding_window": window, "query_pre_attn_scalar": head_dim}
            numbers = {name: value for name, value in numbers.items() if value is not None}
            if is_27b:
                numbers["query_pre_attn_scalar"] = mean_head_dim
            activation = "gelu_pytorch_tanh"
            return numbers | {"hidden_act": activation, "hidden_activation": activation}
        return {}

    def _check_settings(self) -> None:
        """Refuse settings that would change the result and that nobody here reads."""
        prefix, own_keys = self._key(""), _OWN_KEYS.get(self.architecture, frozenset())
        for key, value in self._metadata.values.items():
            name = key.removeprefix(prefix)
            if name == key or name in _APPLIED_KEYS | _INERT_KEYS | own_keys:
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

    def _rope_scaling(
        self, tensors: Mapping[str, np.ndarray], rotary_dim: int
    ) -> dict[str, Any] | None:
        old_factor = self._metadata.number(self._key("rope.scale_linear")) or 1.0
        kind = self._metadata.string(self._key("rope.scaling.type"))
        kind = kind or ("none" if old_factor == 1.0 else "linear")
        if kind not in ("none", "linear", "longrope"):
            rule = "must be none, linear or longrope in this release"
            self._metadata.refuse(self._key("rope.scaling.type"), f"{rule}; got {kind!r}")
        factor = self._metadata.number(self._key("rope.scaling.factor")) or old_factor
        freqs, short, long = (
            self._rope_factors(name, tensors.get(name), rotary_dim) for name in ROPE_FACTORS
        )
        if kind == "longrope" or short or long:
            return self._longrope(short, long)
        if freqs is None:
            return {"rope_type": "linear", "factor": factor} if kind == "linear" else None
        if kind == "linear":
            self._metadata.refuse("rope_freqs.weight", "must not stand beside linear scaling")
        return {"rope_type": "frequency_factors", "frequency_factors": freqs}

    def _rope_factors(
        self, name: str, values: np.ndarray | None, rotary_dim: int
    ) -> list[float] | None:
        """The values of a tensor of factors, checked; None where the file has none."""
        if values is None:
            return None
        count = rotary_dim // 2
        if values.shape != (count,) or not np.isfinite(values).all() or min(values) <= 0:
            self._metadata.refuse(name, f"must be {count} finite values above 0")
        return values.tolist()

    def _longrope(self, short: list[float] | None, long: list[float] | None) -> dict[str, Any]:
        if self.architecture != "phi3":
            rule = "longrope is supported for phi3 alone in this release"
            self._metadata.refuse(self._key("rope.scaling.type"), rule)
        if short is None or long is None:
            missing = ROPE_FACTORS[1 if short is None else 2]
            self._metadata.refuse(missing, "the tensor is missing")
        scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        attention_factor = self._metadata.number(self._key("rope.scaling.attn_factor"))
        return scaling | {"attention_factor": attention_factor}

    def _dtype(self) -> str:
        """What to compute in: the file's own type, bfloat16 for quantised and mixed ones."""
        types = {info.type_name for info in self._tensors.values() if len(info.shape) > 1}
        return "float32" if types == {"F32"} else "float16" if types == {"F16"} else "bfloat16"
