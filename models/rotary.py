"""Rotary position embedding and its scalings."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from models.rope_scaling import RopeScaling


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """float32[rotary_dim / 2] radians a position.

    Source: Su et al. 2021; the scalings as in Hugging Face's modeling_rope_utils.
    """
    dim = config.rotary_dim
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    frequencies = (1.0 / np.float32(config.rope_theta) ** exponents).astype(np.float32)
    scaling = config.rope_scaling.for_length(config.max_position_embeddings)
    return _scale(frequencies, scaling).astype(np.float32)


def _scale(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    if scaling.rope_type == "frequency_factors":
        return frequencies / np.asarray(scaling.frequency_factors, np.float32)
    if scaling.rope_type == "llama3":
        return _scale_llama3(frequencies, scaling)
    return frequencies


def _scale_llama3(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Long waves are divided by `factor`, short ones kept, those between interpolated."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def rotary_angles(
    positions: jax.Array, frequencies: np.ndarray, attention_factor: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of int32[T] positions, times a factor, each float32[T, rotary_dim / 2]."""
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    return jnp.cos(angles) * attention_factor, jnp.sin(angles) * attention_factor
