"""ModelConfig: the numbers of one architecture, read from config.json; no JAX."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.errors import ModelLoadError

KNOWN_ROPE_TYPES = ("default", "linear", "llama3", "frequency_factors")
STORED_HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How the rotary frequencies differ from `theta ** (-2i / head_dim)`.

    Attributes:
      rope_type: "default", "linear" (positions divided by factor), "llama3" (low frequencies
        divided by factor, with a smooth border) or "frequency_factors" (one divisor for each
        frequency, as GGUF files carry them).
      factor: divisor of "linear" and "llama3".
      low_freq_factor, high_freq_factor, original_max_position_embeddings: of "llama3".
      frequency_factors: of "frequency_factors", one for each pair of dimensions.
    """

    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    frequency_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The numbers of one decoder; the names are those of Hugging Face's config.json."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "bfloat16"

    @property
    def num_query_heads_per_kv_head(self) -> int:
        """G of the fused qkv weight."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def stored_head_dim(self) -> int:
        """The smallest head dim that the kernels take and that holds `head_dim`."""
        return next(dim for dim in STORED_HEAD_DIMS if dim >= self.head_dim)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], source: str = "config.json") -> "ModelConfig":
        """Read the numbers of a config.json.

        Raises:
          ModelLoadError: a number is missing, out of bounds, or asks for what is not supported.
        """
        reader = _Reader(config, source)
        heads = reader.integer("num_attention_heads", 1, 1024)
        hidden = reader.integer("hidden_size", 1, 1 << 17)
        head_dim = reader.integer("head_dim", 1, 256, hidden // heads)
        kv_heads = reader.integer("num_key_value_heads", 1, 1024, heads)
        if heads % kv_heads:
            raise reader.error("num_attention_heads", f"must be a multiple of {kv_heads=}", heads)
        if head_dim % 2:
            raise reader.error("head_dim", "must be even", head_dim)
        reader.refuse_unsupported()
        return cls(
            architecture=reader.architecture(),
            vocab_size=reader.integer("vocab_size", 1, 1 << 22),
            hidden_size=hidden,
            intermediate_size=reader.integer("intermediate_size", 1, 1 << 20),
            num_hidden_layers=reader.integer("num_hidden_layers", 1, 1024),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            rope_theta=reader.rope_theta(),
            rope_scaling=reader.rope_scaling(),
            max_position_embeddings=reader.integer("max_position_embeddings", 1, 1 << 30, 2048),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            eos_token_ids=reader.token_ids("eos_token_id"),
            bos_token_id=next(iter(reader.token_ids("bos_token_id")), None),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
        )


class _Reader:
    """Typed, bounded access to a config dictionary; every refusal names file, key and value."""

    def __init__(self, config: Mapping[str, Any], source: str):
        self.config, self.source = config, source

    def error(self, key: str, rule: str, value: object) -> ModelLoadError:
        return ModelLoadError(f"{self.source}: {key} {rule}; got {value!r}")

    def architecture(self) -> str:
        names = self.config.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise self.error("architectures", "must be a list that starts with a name", names)
        return names[0]

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self.config.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"must be an integer in [{low}, {high}]", value)
        return value

    def number(self, key: str, default: float, config: Mapping[str, Any] | None = None) -> float:
        value = (self.config if config is None else config).get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0:
            raise self.error(key, "must be a finite number above 0", value)
        return float(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.config.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
            raise self.error(key, "must be a token id or a list of them", value)
        return tuple(values)

    def rope_parameters(self) -> Mapping[str, Any]:
        """Transformers 5 keeps theta and scaling together, earlier releases apart."""
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        if not isinstance(rope, Mapping):
            raise self.error("rope_scaling", "must be an object", rope)
        return rope

    def rope_theta(self) -> float:
        rope = self.rope_parameters()
        return self.number("rope_theta", 10000.0, rope if "rope_theta" in rope else None)

    def rope_scaling(self) -> RopeScaling:
        rope = self.rope_parameters()
        rope_type = rope.get("rope_type") or rope.get("type") or "default"
        if rope_type not in KNOWN_ROPE_TYPES:
            raise self.error("rope_type", f"must be one of {KNOWN_ROPE_TYPES}", rope_type)
        if rope_type == "default":
            return RopeScaling()
        low, high = (self.number(f"{name}_freq_factor", x, rope) for name, x in _LLAMA3_BORDERS)
        if rope_type == "llama3" and low >= high:
            raise self.error("low_freq_factor", f"must be below high_freq_factor={high}", low)
        return RopeScaling(
            rope_type=rope_type,
            factor=self.number("factor", 1.0, rope),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position_embeddings=int(
                self.number("original_max_position_embeddings", 8192, rope)
            ),
            frequency_factors=tuple(rope.get("frequency_factors", ())),
        )

    def refuse_unsupported(self) -> None:
        """Refuse what would change the result and is not built yet."""
        activation = self.config.get("hidden_act", "silu")
        if activation != "silu":
            raise self.error("hidden_act", "must be 'silu' in this release", activation)
        if self.config.get("quantization_config"):
            raise self.error(
                "quantization_config", "is not supported in this release", "a quantised checkpoint"
            )
        if self.config.get("use_sliding_window"):
            raise self.error("use_sliding_window", "is not supported in this release", True)


_LLAMA3_BORDERS = (("low", 1.0), ("high", 4.0))
