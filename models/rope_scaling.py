"""RopeScaling: how a model's rotary frequencies are scaled, read from either style of config."""

from dataclasses import dataclass

from models.typed_config import TypedConfig

MAX_POSITIONS = 1 << 30

_KEYS_READ: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "frequency_factors": ("frequency_factors",),
}
"""The known types, and what each reads."""
_KEYS_OF_ALL = ("rope_type", "type", "rope_theta")
_INERT: dict[str, tuple[object, ...] | None] = {
    "original_max_position_embeddings": None,
    "finetuned": None,
    "factor": (1,),
    "partial_rotary_factor": (1,),
}
"""Keys that change nothing where a type does not read them: with any value, or with these."""


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


def read_rope(
    config: TypedConfig, *, head_dim: int, max_position_embeddings: int
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
    name = "type" if rope.values.get("rope_type") is None else "rope_type"
    rope_type = rope.choice(name, tuple(_KEYS_READ), "default")
    _refuse_unread(rope, rope_type)
    if rope_type == "linear":
        return theta, RopeScaling(rope_type=rope_type, factor=rope.number("factor"))
    if rope_type == "frequency_factors":
        factors = rope.numbers("frequency_factors", head_dim // 2)
        return theta, RopeScaling(rope_type=rope_type, frequency_factors=factors)
    if rope_type == "llama3":
        return theta, _read_llama3(config, rope, max_position_embeddings)
    return theta, RopeScaling()


def _read_llama3(
    config: TypedConfig, rope: TypedConfig, max_position_embeddings: int
) -> RopeScaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.error("low_freq_factor", f"must be below high_freq_factor={high}", low)
    key = "original_max_position_embeddings"
    owner = rope if config.values.get(key) is None else config
    return RopeScaling(
        rope_type="llama3",
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=owner.integer(
            key, 1, MAX_POSITIONS, max_position_embeddings
        ),
    )


def _refuse_unread(rope: TypedConfig, rope_type: str) -> None:
    """Refuse what would be ignored: yarn's and longrope's factors, one object a layer type."""
    for key, value in rope.values.items():
        if value is None or key in _KEYS_OF_ALL or key in _KEYS_READ[rope_type]:
            continue
        if key not in _INERT:
            raise rope.error(key, f"is not supported with rope type {rope_type}", value)
        accepted = _INERT[key]
        if accepted is not None and value not in accepted:
            raise rope.error(key, f"must be {accepted[0]} with rope type {rope_type}", value)
