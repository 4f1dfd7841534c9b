"""RopeScaling: how a model's rotary frequencies are scaled, read from either style of config."""

import math
from dataclasses import dataclass, replace

from models.family_settings import FamilySettings
from models.typed_config import TypedConfig

MAX_POSITIONS = 1 << 30

_KEYS_READ: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": (
        "short_factor", "long_factor", "factor", "attention_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        "factor", "attention_factor", "beta_fast", "beta_slow", "original_max_position_embeddings",
    ),
    "frequency_factors": ("frequency_factors",),
}  # fmt: skip
"""The known types, and what each reads."""
_KEYS_OF_ALL = ("rope_type", "type", "rope_theta")
_INERT: dict[str, tuple[object, ...] | None] = {
    "original_max_position_embeddings": None,
    "finetuned": None,
    "factor": (1,),
    "partial_rotary_factor": (1,),
    "truncate": (True,),  # of "yarn", and its default
}
"""Keys that change nothing where a type does not read them: with any value, or with these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How the rotary frequencies differ from `theta ** (-2i / head_dim)`.

    Attributes:
      rope_type: "default", "linear" (positions divided by factor), "llama3" (low frequencies
        divided by factor, with a smooth border), "frequency_factors" (one divisor for each
        frequency, as GGUF files carry them and as "yarn" gives them) or "longrope" (two lists of
        such divisors).
      factor: divisor of "linear" and "llama3".
      low_freq_factor, high_freq_factor: of "llama3".
      original_max_position_embeddings: of "llama3" and "longrope".
      frequency_factors: of "frequency_factors", one for each pair of rotated dimensions.
      short_factor, long_factor: of "longrope"; the latter for sequences past the original length.
      attention_factor: multiplies cosine and sine.
      partial_rotary_factor: share of each head's dimensions that is rotated.
    """

    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    frequency_factors: tuple[float, ...] = ()
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    attention_factor: float = 1.0
    partial_rotary_factor: float = 1.0

    def for_length(self, max_model_len: int) -> "RopeScaling":
        """The scaling for sequences of at most this length: longrope becomes one list of factors.

        The list is chosen by the longest sequence that may come, as in vLLM, not by each
        sequence's own length: keys in the cache keep the rotation they were written with.
        """
        if self.rope_type != "longrope":
            return self
        is_long = max_model_len > self.original_max_position_embeddings
        return RopeScaling(
            rope_type="frequency_factors",
            frequency_factors=self.long_factor if is_long else self.short_factor,
            attention_factor=self.attention_factor,
            partial_rotary_factor=self.partial_rotary_factor,
        )


def read_rope(
    config: TypedConfig, family: FamilySettings, *, head_dim: int, max_position_embeddings: int
) -> tuple[float, RopeScaling]:
    """Theta and the scaling.

    Transformers 5 keeps both in `rope_parameters`; 4 keeps `rope_theta` apart and the rest in
    `rope_scaling`, which wins where both stand.

    Raises:
      ModelLoadError: an unknown type, a value that the type needs and that is missing or out of
        bounds, or one that nobody would read.
    """
    rope = config.part("rope_scaling" if config.values.get("rope_scaling") else "rope_parameters")
    theta = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    rope_type = _rope_type(rope, family)
    partial = _read_partial_factor(config, rope, family, head_dim)
    _refuse_unread(rope, rope_type, "partial_rotary_factor" if partial != 1 else None)
    rotary_dim = int(head_dim * partial)
    num_frequencies = rotary_dim // 2
    scaling = RopeScaling()
    if rope_type == "linear":
        scaling = RopeScaling(rope_type=rope_type, factor=rope.number("factor"))
    elif rope_type == "frequency_factors":
        factors = rope.numbers("frequency_factors", num_frequencies)
        scaling = RopeScaling(rope_type=rope_type, frequency_factors=factors)
    elif rope_type == "llama3":
        scaling = _read_llama3(config, rope, max_position_embeddings)
    elif rope_type == "longrope":
        scaling = _read_longrope(config, rope, num_frequencies, max_position_embeddings)
    elif rope_type == "yarn":
        original = _original_length(config, rope, max_position_embeddings)
        scaling = _read_yarn(rope, theta=theta, rotary_dim=rotary_dim, original=original)
    return theta, replace(scaling, partial_rotary_factor=partial)


def _rope_type(rope: TypedConfig, family: FamilySettings) -> str:
    name = "type" if rope.values.get("rope_type") is None else "rope_type"
    own_name = rope.values.get(name)
    if isinstance(own_name, str) and own_name in family.rope_types:
        return family.rope_types[own_name]
    return rope.choice(name, tuple(_KEYS_READ), "default")


def _read_partial_factor(
    config: TypedConfig, rope: TypedConfig, family: FamilySettings, head_dim: int
) -> float:
    key = "partial_rotary_factor"
    if key not in family.accepts:
        return 1.0
    owner = config if rope.values.get(key) is None else rope
    factor = owner.number(key, 1.0)
    rotary_dim = int(head_dim * factor)
    if factor > 1 or rotary_dim < 2 or rotary_dim % 2:
        rule = f"must rotate an even number of the {head_dim} dimensions of a head"
        raise owner.error(key, rule, factor)
    return factor


def _read_llama3(config: TypedConfig, rope: TypedConfig, longest: int) -> RopeScaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.error("low_freq_factor", f"must be below high_freq_factor={high}", low)
    return RopeScaling(
        rope_type="llama3",
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=_original_length(config, rope, longest),
    )


def _read_longrope(
    config: TypedConfig, rope: TypedConfig, num_frequencies: int, longest: int
) -> RopeScaling:
    original = _original_length(config, rope, longest)
    factor = rope.number("factor", longest / original)
    grown = 1.0
    if factor > 1 and original > 1:
        grown = math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeScaling(
        rope_type="longrope",
        short_factor=rope.numbers("short_factor", num_frequencies),
        long_factor=rope.numbers("long_factor", num_frequencies),
        attention_factor=rope.number("attention_factor", grown),
        original_max_position_embeddings=original,
    )


def _read_yarn(rope: TypedConfig, *, theta: float, rotary_dim: int, original: int) -> RopeScaling:
    """Slow turns are divided by `factor`, quick ones kept, with a ramp over the index between.

    Source: Peng et al. 2023; the numbers as in Hugging Face's modeling_rope_utils.
    """
    if theta <= 1:
        raise rope.error("rope_theta", "must be above 1 with rope type yarn", theta)
    factor = rope.number("factor")

    def index_of(num_turns: float) -> float:
        """Where a frequency makes so many turns within the original length."""
        return rotary_dim * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(index_of(rope.number("beta_fast", 32.0))), 0)
    high = min(math.ceil(index_of(rope.number("beta_slow", 1.0))), rotary_dim - 1)
    width = high - low or 0.001
    ramp = [min(max((index - low) / width, 0.0), 1.0) for index in range(rotary_dim // 2)]
    stretch = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    return RopeScaling(
        rope_type="frequency_factors",
        frequency_factors=tuple(1 / (share / factor + 1 - share) for share in ramp),
        attention_factor=rope.number("attention_factor", stretch),
    )


def _original_length(config: TypedConfig, rope: TypedConfig, longest: int) -> int:
    """The length of the training; beside the scaling it wins over within it."""
    key = "original_max_position_embeddings"
    owner = rope if config.values.get(key) is None else config
    return owner.integer(key, 1, MAX_POSITIONS, longest)


def _refuse_unread(rope: TypedConfig, rope_type: str, also_read: str | None) -> None:
    """Refuse what would be ignored: yarn's factors, one object a layer type."""
    for key, value in rope.values.items():
        if value is None or key in _KEYS_OF_ALL or key in _KEYS_READ[rope_type] or key == also_read:
            continue
        if key not in _INERT:
            raise rope.error(key, f"is not supported with rope type {rope_type}", value)
        accepted = _INERT[key]
        if accepted is not None and value not in accepted:
            raise rope.error(key, f"must be {accepted[0]} with rope type {rope_type}", value)
