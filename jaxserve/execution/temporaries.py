"""estimate_temporaries: what the largest step needs, where no device is there to compile it for."""

import jax.numpy as jnp

from jaxserve.execution.buckets import BucketTable
from jaxserve.execution.model_setup import ModelSetup
from jaxserve.execution.sampler import FEW_DRAW_ROWS, padded_rows

SAMPLER_ARRAYS = 6
"""float32[R, V] that the sampler with log-probabilities holds at the same time. An H200 needs 3.48
GiB for 1,024 rows of 151,936 tokens (Qwen3-0.6B, 2026-12), which is six times 0.58 GiB."""

ESTIMATE_METHOD = (
    f"the larger of a layer's activations for the largest bucket's tokens and {SAMPLER_ARRAYS} "
    f"float32 arrays of logits for its rows; nothing was compiled"
)


def estimate_temporaries(setup: ModelSetup, buckets: BucketTable) -> int:
    """Bytes on one device of the larger of the two programs that a mixed step runs.

    Args:
      setup: of the model.
      buckets: the last one counts.
    """
    largest = buckets.all()[-1]
    return max(_forward_bytes(setup, largest.num_tokens), _sampler_bytes(setup, largest.num_rows))


def _forward_bytes(setup: ModelSetup, num_tokens: int) -> int:
    """The residual, what is added to it and its norm, and what attention or the MLP make of it."""
    model, num_devices = setup.shared_model, setup.sharder.mesh.size
    stored_query = model.num_attention_heads * setup.geometries[0].stored_head_dim
    attention = model.qkv_size + 2 * stored_query  # queries as the kernel takes and gives them
    mlp = 3 * model.intermediate_size  # gate, up, and their product
    widest = 3 * model.hidden_size + -(-max(attention, mlp) // num_devices)
    return num_tokens * widest * jnp.dtype(setup.dtype).itemsize


def _sampler_bytes(setup: ModelSetup, num_rows: int) -> int:
    """Devices share whole rows of logits where the rows divide by them."""
    num_devices = setup.sharder.mesh.size
    if setup.is_gpu:
        num_rows = padded_rows(num_rows, FEW_DRAW_ROWS)
    own_rows = num_rows if num_rows % num_devices else num_rows // num_devices
    return SAMPLER_ARRAYS * own_rows * setup.model.vocab_size * 4
