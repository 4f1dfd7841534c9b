"""ModelConfig: the numbers of one architecture, read from config.json; no JAX."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from models.family_settings import settings_of
from models.rope_scaling import MAX_POSITIONS, RopeScaling, read_rope
from models.typed_config import TypedConfig
from models.unsupported_settings import refuse_unsupported

STORED_HEAD_DIMS = (64, 128, 256)
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The numbers of one decoder; the names are those of Hugging Face's config.json.

    Attributes:
      attention_bias: q, k, v and o have a bias.
      qkv_bias: q, k and v have one, o has none.
      layer_windows: keys that a query sees in each layer, its own included, None = all; empty
        when every layer sees everything.
      query_pre_attn_scalar: logits are scaled by `query_pre_attn_scalar ** -0.5`; None = head_dim.
      attn_logit_softcapping: logits x of attention become `cap * tanh(x / cap)`; None = they stay.
      final_logit_softcapping: the same for the logits of the vocabulary.
    """

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
    qkv_bias: bool = False
    mlp_bias: bool = False
    layer_windows: tuple[int | None, ...] = ()
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "bfloat16"
    kv_head_copies: int = 1
    """How often each KV head of the checkpoint stands in `num_key_value_heads`: more than 1 only
    where devices share a model of fewer KV heads."""

    @property
    def num_query_heads_per_kv_head(self) -> int:
        """G of the fused qkv weight."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def qkv_size(self) -> int:
        """Columns of the fused qkv weight."""
        return (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim

    @property
    def stored_head_dim(self) -> int:
        """The smallest head dim that the kernels take and that holds `head_dim`."""
        return next(dim for dim in STORED_HEAD_DIMS if dim >= self.head_dim)

    @property
    def rotary_dim(self) -> int:
        """How many dimensions of each head are rotated; the first ones."""
        return int(self.head_dim * self.rope_scaling.partial_rotary_factor)

    @property
    def attention_scale(self) -> float:
        """What multiplies the logits of attention."""
        return 1 / math.sqrt(self.query_pre_attn_scalar or self.head_dim)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None where a query sees all keys."""
        return self.layer_windows or (None,) * self.num_hidden_layers

    def for_length(self, max_model_len: int) -> "ModelConfig":
        """The config for sequences of at most this length: longrope settles for one of its lists.

        Transformers chooses by each sequence's length; vLLM and we choose once, by the longest.
        """
        return replace(self, rope_scaling=self.rope_scaling.for_length(max_model_len))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], source: str = "config.json") -> "ModelConfig":
        """Read the numbers of a config.json.

        Raises:
          ModelLoadError: a number is missing, out of bounds, or asks for what is not supported.
        """
        architecture = _architecture(TypedConfig(config, source))
        family = settings_of(architecture)
        refuse_unsupported(TypedConfig(config, source), family.accepts)
        reader = TypedConfig({**family.defaults, **config, **family.fixed}, source)
        heads = reader.integer("num_attention_heads", 1, 1024)
        hidden = reader.integer("hidden_size", 1, 1 << 17)
        kv_heads = reader.integer("num_key_value_heads", 1, 1024, heads)
        if heads % kv_heads:
            raise reader.error("num_attention_heads", f"must be a multiple of {kv_heads=}", heads)
        head_dim = _head_dim(reader, hidden, heads)
        max_positions = reader.integer("max_position_embeddings", 1, MAX_POSITIONS, 2048)
        num_layers = reader.integer("num_hidden_layers", 1, 1024)
        theta, scaling = read_rope(
            reader, family, head_dim=head_dim, max_position_embeddings=max_positions
        )
        dtype_key = "torch_dtype" if config.get("dtype") is None else "dtype"
        return cls(
            architecture=architecture,
            vocab_size=reader.integer("vocab_size", 1, 1 << 22),
            hidden_size=hidden,
            intermediate_size=reader.integer("intermediate_size", 1, 1 << 20),
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=max_positions,
            tie_word_embeddings=reader.boolean("tie_word_embeddings"),
            attention_bias=reader.boolean("attention_bias"),
            qkv_bias=family.fixed.get("qkv_bias", False),
            mlp_bias=reader.boolean("mlp_bias"),
            layer_windows=_useful_windows(family.layer_windows(reader, num_layers), max_positions),
            query_pre_attn_scalar=reader.optional_number("query_pre_attn_scalar"),
            attn_logit_softcapping=reader.optional_number("attn_logit_softcapping"),
            final_logit_softcapping=reader.optional_number("final_logit_softcapping"),
            eos_token_ids=reader.token_ids("eos_token_id"),
            bos_token_id=next(iter(reader.token_ids("bos_token_id")), None),
            dtype=reader.choice(dtype_key, DTYPES, "bfloat16"),
        )


def _useful_windows(windows: tuple[int | None, ...], longest: int) -> tuple[int | None, ...]:
    """Windows that are shorter than the longest sequence; the others hide nothing."""
    useful = tuple(w if w is not None and w < longest else None for w in windows)
    return useful if any(useful) else ()


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
