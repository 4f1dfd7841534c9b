"""The tensors of each GGUF architecture, with Hugging Face's names and shapes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from models.loading.gguf_config import ROPE_FACTORS


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTensor:
    """One tensor that the architecture has.

    Attributes:
      gguf_name, hf_name: its two names.
      shape: as in a Hugging Face checkpoint, [out, in].
      permuted_heads: heads whose rows llama.cpp's converter has interleaved; 0 = rows are as in
        the checkpoint.
      added: what the converter has added to each value.
    """

    gguf_name: str
    hf_name: str
    shape: tuple[int, ...]
    permuted_heads: int = 0
    added: float = 0.0


_GEMMA_NORM_OFFSET = 1.0
_GEMMA2_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


def expected_tensors(
    architecture: str, config: dict[str, Any], is_present: Callable[[str], bool]
) -> list[ExpectedTensor]:
    """All tensors of a model, in the order in which to load them: layer after layer.

    Args:
      architecture: a key of `gguf_config.ARCHITECTURES`.
      config: in config.json's form.
      is_present: whether the file holds a tensor of that GGUF name; asked for optional ones.
    """
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    top = [
        ExpectedTensor(
            gguf_name="token_embd.weight",
            hf_name="model.embed_tokens.weight",
            shape=(vocab, hidden),
        )
    ]
    rotary_dim = int(config["head_dim"] * config.get("partial_rotary_factor", 1.0))
    top += [
        ExpectedTensor(gguf_name=name, hf_name=name, shape=(rotary_dim // 2,))
        for name in ROPE_FACTORS
        if is_present(name)
    ]
    last = [
        ExpectedTensor(
            gguf_name="output_norm.weight",
            hf_name="model.norm.weight",
            shape=(hidden,),
            added=_norm_offset(architecture),
        )
    ]
    if is_present("output.weight"):
        last.append(
            ExpectedTensor(
                gguf_name="output.weight", hf_name="lm_head.weight", shape=(vocab, hidden)
            )
        )
    of_layer = _layer_tensors(architecture, config)
    layers = [
        replace(
            tensor,
            gguf_name=f"blk.{layer}.{tensor.gguf_name}",
            hf_name=f"model.layers.{layer}.{tensor.hf_name}",
        )
        for layer in range(config["num_hidden_layers"])
        for tensor in of_layer
    ]
    return top + layers + last


def _layer_tensors(architecture: str, config: dict[str, Any]) -> list[ExpectedTensor]:
    """The tensors of one layer, named within it."""
    tensors = [
        ExpectedTensor(
            gguf_name=f"{name}.weight",
            hf_name=f"{hf_name}.weight",
            shape=(size,),
            added=_norm_offset(architecture),
        )
        for name, (hf_name, size) in _norms(architecture, config).items()
    ]
    for name, (hf_name, rows, columns, permuted) in _products(architecture, config).items():
        kinds: dict[str, tuple[int, ...]] = {"weight": (rows, columns)}
        if _has_bias(architecture, config, name):
            kinds["bias"] = (rows,)
        tensors += [
            ExpectedTensor(
                gguf_name=f"{name}.{kind}",
                hf_name=f"{hf_name}.{kind}",
                shape=shape,
                permuted_heads=permuted if architecture == "llama" else 0,
            )
            for kind, shape in kinds.items()
        ]
    return tensors


def _norm_offset(architecture: str) -> float:
    return _GEMMA_NORM_OFFSET if architecture == "gemma2" else 0.0


def _norms(architecture: str, config: dict[str, Any]) -> dict[str, tuple[str, int]]:
    """GGUF name -> Hugging Face's, and the size."""
    names = _GEMMA2_NORMS if architecture == "gemma2" else _NORMS
    norms = {name: (hf_name, config["hidden_size"]) for name, hf_name in names.items()}
    if architecture == "qwen3":
        norms |= {f"attn_{x}_norm": (f"self_attn.{x}_norm", config["head_dim"]) for x in "qk"}
    return norms


def _products(architecture: str, config: dict[str, Any]) -> dict[str, tuple[str, int, int, int]]:
    """GGUF name -> Hugging Face's, rows, columns, and heads that Llama's converter interleaves."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    query_rows, key_rows = heads * config["head_dim"], kv_heads * config["head_dim"]
    after = {
        "attn_output": ("self_attn.o_proj", hidden, query_rows, 0),
        "ffn_down": ("mlp.down_proj", hidden, inner, 0),
    }
    if architecture == "phi3":
        return after | {
            "attn_qkv": ("self_attn.qkv_proj", query_rows + 2 * key_rows, hidden, 0),
            "ffn_up": ("mlp.gate_up_proj", 2 * inner, hidden, 0),
        }
    return after | {
        "attn_q": ("self_attn.q_proj", query_rows, hidden, heads),
        "attn_k": ("self_attn.k_proj", key_rows, hidden, kv_heads),
        "attn_v": ("self_attn.v_proj", key_rows, hidden, 0),
        "ffn_gate": ("mlp.gate_proj", inner, hidden, 0),
        "ffn_up": ("mlp.up_proj", inner, hidden, 0),
    }


def _has_bias(architecture: str, config: dict[str, Any], name: str) -> bool:
    if architecture == "qwen2":
        return name in ("attn_q", "attn_k", "attn_v")
    return config["attention_bias" if name.startswith("attn") else "mlp_bias"]
