"""What each family's config.json says differently from Llama's: one entry a family; no JAX."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from models.typed_config import TypedConfig

MAX_WINDOW = 1 << 30
LAYER_TYPES = ("full_attention", "sliding_attention")

WindowedLayers = Callable[[TypedConfig, int], tuple[bool, ...]]
"""(config, number of layers) -> whether each layer has the window, where no `layer_types` stand."""


def every_layer(config: TypedConfig, num_layers: int) -> tuple[bool, ...]:
    """All layers have the window, if there is one."""
    return (config.values.get("sliding_window") is not None,) * num_layers


def even_layers(config: TypedConfig, num_layers: int) -> tuple[bool, ...]:
    """Layers 0, 2, 4 and so on have the window, if there is one."""
    has_window = config.values.get("sliding_window") is not None
    return tuple(has_window and index % 2 == 0 for index in range(num_layers))


def layers_from_max_window_layers(config: TypedConfig, num_layers: int) -> tuple[bool, ...]:
    """Qwen's: a switch of its own, and the first layers see everything."""
    is_on = config.boolean("use_sliding_window") and config.values.get("sliding_window") is not None
    first = config.integer("max_window_layers", 0, 1 << 20, 28)
    return tuple(is_on and index >= first for index in range(num_layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySettings:
    """How to read one family's config.json.

    Attributes:
      defaults: what transformers takes for keys that are absent, where it differs from Llama's.
      fixed: keys that the family's wiring settles, whatever the config says.
      accepts: keys of `unsupported_settings` that the family has built -> the values with which
        they are accepted; None = every value, since the key is read.
      windowed_layers: which layers have the sliding window; None = the family knows no window.
      rope_types: names of rope types that only this family's configs use -> ours.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    accepts: Mapping[str, tuple[Any, ...] | None] = field(default_factory=dict)
    windowed_layers: WindowedLayers | None = None
    rope_types: Mapping[str, str] = field(default_factory=dict)

    def layer_windows(self, config: TypedConfig, num_layers: int) -> tuple[int | None, ...]:
        """The window of each layer; empty when no layer has one.

        Raises:
          ModelLoadError: `layer_types` does not fit the layers, or the window is no length.
        """
        if self.windowed_layers is None:
            return ()
        if "layer_types" in self.accepts and config.values.get("layer_types") is not None:
            types = config.choices("layer_types", num_layers, LAYER_TYPES)
            has_window = tuple(name == "sliding_attention" for name in types)
        else:
            has_window = self.windowed_layers(config, num_layers)
        if not any(has_window):
            return ()
        window = config.integer("sliding_window", 1, MAX_WINDOW)
        return tuple(window if windowed else None for windowed in has_window)


_QWEN_WINDOW = {"use_sliding_window": None, "sliding_window": None, "layer_types": None}
_NO_BIAS = {"attention_bias": False, "mlp_bias": False}

_FAMILIES: dict[str, FamilySettings] = {
    "LlamaForCausalLM": FamilySettings(),
    "Qwen2ForCausalLM": FamilySettings(
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768},
        fixed=_NO_BIAS | {"qkv_bias": True},
        accepts=_QWEN_WINDOW,
        windowed_layers=layers_from_max_window_layers,
    ),
    "Qwen3ForCausalLM": FamilySettings(
        defaults={"head_dim": 128, "num_key_value_heads": 32, "max_position_embeddings": 32768},
        accepts=_QWEN_WINDOW,
        windowed_layers=layers_from_max_window_layers,
    ),
    "MistralForCausalLM": FamilySettings(
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        fixed=_NO_BIAS,
        accepts={"sliding_window": None},
        windowed_layers=every_layer,
    ),
    "Phi3ForCausalLM": FamilySettings(
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
        fixed=_NO_BIAS,
        accepts={"sliding_window": None, "partial_rotary_factor": None},
        windowed_layers=every_layer,
        rope_types={"su": "longrope", "yarn": "longrope"},
    ),
    "Gemma2ForCausalLM": FamilySettings(
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        fixed={"mlp_bias": False},
        accepts={
            "hidden_act": ("gelu_pytorch_tanh", "gelu"),  # not read: the next key is
            "hidden_activation": ("gelu_pytorch_tanh",),
            "query_pre_attn_scalar": None,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "sliding_window": None,
            "layer_types": None,
        },
        windowed_layers=even_layers,
    ),
}


KNOWN_ARCHITECTURES = tuple(sorted(_FAMILIES))


def settings_of(architecture: str) -> FamilySettings:
    """The settings of an architecture; Llama's for one that is not known."""
    return _FAMILIES.get(architecture, FamilySettings())
