"""Tiny configs, layouts and weights for the tests of the models floor."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.batch import ForwardBatch
from models.config import ModelConfig
from models.kernels import model_kernels
from models.kv_cache import KVCache, allocate_cache, cache_geometries
from models.layers import compute_logits
from models.registry import model_class
from models.sharding import Sharder, make_mesh
from models.weight_layout import Stack, WeightLayout

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 10,
    "intermediate_size": 3,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
"""In the style of transformers 4; no two of its sizes are equal where that could hide a mistake."""


def tiny_config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(LLAMA | changes)


def make_layout(config: ModelConfig, stack: Stack = "none", dtype: str = "float32") -> WeightLayout:
    return WeightLayout.of_model(
        model_class(config.architecture),
        config,
        stack=stack,
        dtype=dtype,
        kernels=model_kernels("xla", "cpu"),
    )


def one_device() -> Sharder:
    return Sharder(make_mesh())


def random_parameters(layout: WeightLayout) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {parameter.path: parameter.shape for parameter in layout.parameters}
    return {path: rng.normal(size=shape).astype(np.float32) for path, shape in shapes.items()}


def prompt_and_cache(config: ModelConfig, num_tokens: int = 5) -> tuple[ForwardBatch, KVCache]:
    """A prompt in page 1, all of whose positions give hidden states."""
    geometries = cache_geometries(config, page_size=16, dtype="float32")
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    batch = ForwardBatch(
        token_ids=tokens,
        positions=tokens[None],
        slot_mapping=(16 + tokens,),
        page_tables=(jnp.ones((1, 1), jnp.int32),),
        seq_lens=jnp.array([num_tokens], jnp.int32),
        query_start_loc=jnp.array([0, num_tokens], jnp.int32),
        num_decode_rows=jnp.zeros(1, jnp.int32),
        logits_indices=tokens,
    )
    return batch, allocate_cache(geometries, (2,), one_device())


def logits_of(
    layout: WeightLayout, leaves: list[jax.Array], batch: ForwardBatch, cache: KVCache
) -> np.ndarray:
    """Float32 [R, V] of one program; op by op the same compiles for ten times as long."""
    (logits,) = logits_of_each(layout, leaves, [batch], cache)
    return logits


def logits_of_each(
    layout: WeightLayout, leaves: list[jax.Array], batches: Sequence[ForwardBatch], cache: KVCache
) -> list[np.ndarray]:
    """The same of several batches, each with the cache as it is; equal shapes share a program."""

    @jax.jit
    def run(leaves: list[jax.Array], batch: ForwardBatch, cache: KVCache) -> jax.Array:
        hidden, _ = layout.merge(leaves)(batch, cache)
        return compute_logits(leaves[layout.head_index], hidden, layout.logit_soft_cap)

    return [np.asarray(run(leaves, batch, cache)) for batch in batches]


def total_bytes(arrays: list[jax.Array]) -> int:
    return sum(array.nbytes for array in arrays)
