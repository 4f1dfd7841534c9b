"""The settings of a config.json that would change the result and are not built: one list."""

import fnmatch
from collections.abc import Mapping
from typing import Any

from models.typed_config import TypedConfig

ASKS_NOTHING: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "quantization_config": ({},),
    "compression_config": ({},),
    # positions
    "*partial_rotary*": (1,),
    "rotary_pct": (1,),
    "rope_pct": (1,),
    "rotary_dim": (),
    "rope_interleave*": (False,),
    "rope_local_base_freq": (),
    "no_rope_layer*": ([],),
    "position_embedding_type": ("rope",),
    "*alibi*": (False,),
    # what a query sees
    "use_sliding_window": (False,),
    "attention_chunk_size": (),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    # scales and caps
    "*_multiplier": (1,),
    "*_multipliers": (),
    "*softcap*": (),
    "*soft_cap*": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "query_pre_attn_scalar": (),
    "attn_temperature_tuning": (False,),
    "clip_qkv": (),
    "scale_emb": (1,),
    "scale_embedding": (False,),
    "scale_depth": (),
    "dim_model_base": (),
    # other wiring
    "*use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "*parallel_attn": (False,),
    "*parallel_residual": (False,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "*_lora_rank": (),
    "attn*_output_gate": (False,),
}
"""Pattern of a key -> the values, beside null, with which the key asks for nothing.

`layer_types` and `sliding_window` have rules of their own in `_accepted`.
"""


def refuse_unsupported(
    config: TypedConfig, built: Mapping[str, tuple[Any, ...] | None] | None = None
) -> None:
    """Refuse the first setting that would change the result.

    Args:
      config: the whole config.json.
      built: keys that this family has built -> values with which they are accepted; None = all.

    Raises:
      ModelLoadError: names file, key and value.
    """
    built = built or {}
    for key, value in config.values.items():
        accepted = built[key] if key in built else _accepted(key, value, config)
        if value is None or accepted is None or value in accepted:
            continue
        raise config.error(key, _rule(accepted), value)


def _accepted(key: str, value: Any, config: TypedConfig) -> tuple[Any, ...] | None:
    """The values of a key that ask for nothing; None for a key that is read, or inert."""
    if key == "layer_types":
        return (["full_attention"] * len(value),) if isinstance(value, list) else ()
    if key == "sliding_window":  # of Qwen's configs, where a switch of its own turns it on
        return None if "use_sliding_window" in config.values else ()
    for pattern, accepted in ASKS_NOTHING.items():
        if fnmatch.fnmatchcase(key, pattern):
            return accepted
    return None


def _rule(accepted: tuple[Any, ...]) -> str:
    if not accepted or isinstance(accepted[0], list | dict | bool):
        return "is not supported in this release"
    return f"must be {' or '.join(map(repr, accepted))} in this release"
