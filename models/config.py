"""ModelConfig: the numbers of one architecture, read from config.json; no JAX."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.rope_scaling import MAX_POSITIONS, RopeScaling, read_rope
from models.typed_config import TypedConfig
from models.unsupported_settings import refuse_unsupported

STORED_HEAD_DIMS = (64, 128, 256)
DTYPES = ("float32", "float16", "bfloat16")

_FAMILY_DEFAULTS: dict[str, dict[str, int]] = {
    "Qwen3ForCausalLM": {
        "head_dim": 128,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    }
}
"""What transformers takes for keys that are absent, where it differs from Llama's."""


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
        architecture = _architecture(TypedConfig(config, source))
        reader = TypedConfig(_FAMILY_DEFAULTS.get(architecture, {}) | dict(config), source)
        refuse_unsupported(reader)
        heads = reader.integer("num_attention_heads", 1, 1024)
        hidden = reader.integer("hidden_size", 1, 1 << 17)
        kv_heads = reader.integer("num_key_value_heads", 1, 1024, heads)
        if heads % kv_heads:
            raise reader.error("num_attention_heads", f"must be a multiple of {kv_heads=}", heads)
        head_dim = _head_dim(reader, hidden, heads)
        max_positions = reader.integer("max_position_embeddings", 1, MAX_POSITIONS, 2048)
        theta, scaling = read_rope(reader, head_dim=head_dim, max_position_embeddings=max_positions)
        dtype_key = "torch_dtype" if config.get("dtype") is None else "dtype"
        return cls(
            architecture=architecture,
            vocab_size=reader.integer("vocab_size", 1, 1 << 22),
            hidden_size=hidden,
            intermediate_size=reader.integer("intermediate_size", 1, 1 << 20),
            num_hidden_layers=reader.integer("num_hidden_layers", 1, 1024),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=max_positions,
            tie_word_embeddings=reader.boolean("tie_word_embeddings"),
            attention_bias=reader.boolean("attention_bias"),
            mlp_bias=reader.boolean("mlp_bias"),
            eos_token_ids=reader.token_ids("eos_token_id"),
            bos_token_id=next(iter(reader.token_ids("bos_token_id")), None),
            dtype=reader.choice(dtype_key, DTYPES, "bfloat16"),
        )


def _architecture(config: TypedConfig) -> str:
    names = config.values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise config.error("architectures", "must be a list that starts with a name", names)
    return names[0]


def _head_dim(config: TypedConfig, hidden: int, heads: int) -> int:
    if config.values.get("head_dim") is None and hidden % heads:
        raise config.error(
            "hidden_size", f"must be a multiple of {heads=} without head_dim", hidden
        )
    head_dim = config.integer("head_dim", 1, STORED_HEAD_DIMS[-1], hidden // heads)
    if head_dim % 2:
        raise config.error("head_dim", "must be even", head_dim)
    return head_dim
