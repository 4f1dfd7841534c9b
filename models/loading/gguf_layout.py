"""The tensors of each GGUF architecture, with Hugging Face's names and shapes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTensor:
    """One tensor that the architecture has.

    Attributes:
      gguf_name, hf_name: its two names.
      shape: as in a Hugging Face checkpoint, [out, in].
      permuted_heads: heads whose rows llama.cpp's converter has interleaved; 0 = rows are as in
        the checkpoint.
    """

    gguf_name: str
    hf_name: str
    shape: tuple[int, ...]
    permuted_heads: int = 0


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
    if is_present("rope_freqs.weight"):
        top.append(
            ExpectedTensor(
                gguf_name="rope_freqs.weight",
                hf_name="rope_freqs.weight",
                shape=(config["head_dim"] // 2,),
            )
        )
    last = [
        ExpectedTensor(gguf_name="output_norm.weight", hf_name="model.norm.weight", shape=(hidden,))
    ]
    if is_present("output.weight"):
        last.append(
            ExpectedTensor(
                gguf_name="output.weight", hf_name="lm_head.weight", shape=(vocab, hidden)
            )
        )
    of_layer = _layer_tensors(architecture, config)
    layers = [
        ExpectedTensor(
            gguf_name=f"blk.{layer}.{tensor.gguf_name}",
            hf_name=f"model.layers.{layer}.{tensor.hf_name}",
            shape=tensor.shape,
            permuted_heads=tensor.permuted_heads,
        )
        for layer in range(config["num_hidden_layers"])
        for tensor in of_layer
    ]
    return top + layers + last


def _layer_tensors(architecture: str, config: dict[str, Any]) -> list[ExpectedTensor]:
    """The tensors of one layer, named within it."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    inner = config["intermediate_size"]
    products = {
        "attn_q": ("self_attn.q_proj", heads * head_dim, hidden, heads),
        "attn_k": ("self_attn.k_proj", kv_heads * head_dim, hidden, kv_heads),
        "attn_v": ("self_attn.v_proj", kv_heads * head_dim, hidden, 0),
        "attn_output": ("self_attn.o_proj", hidden, heads * head_dim, 0),
        "ffn_gate": ("mlp.gate_proj", inner, hidden, 0),
        "ffn_up": ("mlp.up_proj", inner, hidden, 0),
        "ffn_down": ("mlp.down_proj", hidden, inner, 0),
    }
    norms = {
        "attn_norm": ("input_layernorm", hidden),
        "ffn_norm": ("post_attention_layernorm", hidden),
    }
    if architecture == "qwen3":
        norms |= {
            "attn_q_norm": ("self_attn.q_norm", head_dim),
            "attn_k_norm": ("self_attn.k_norm", head_dim),
        }
    tensors = [
        ExpectedTensor(gguf_name=f"{name}.weight", hf_name=f"{hf_name}.weight", shape=(size,))
        for name, (hf_name, size) in norms.items()
    ]
    for name, (hf_name, rows, columns, permuted) in products.items():
        heads_to_undo = permuted if architecture == "llama" else 0
        has_bias = config["attention_bias" if name.startswith("attn") else "mlp_bias"]
        for kind, shape in [("weight", (rows, columns))] + [("bias", (rows,))] * has_bias:
            tensors.append(
                ExpectedTensor(
                    gguf_name=f"{name}.{kind}",
                    hf_name=f"{hf_name}.{kind}",
                    shape=shape,
                    permuted_heads=heads_to_undo,
                )
            )
    return tensors
