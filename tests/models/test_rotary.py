"""Rotary angles and their scalings against the formulas in float64."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from models.rotary import inverse_frequencies, rotary_angles, rotate
from tests.models.tiny_models import tiny_config

HEAD_DIM, THETA = 64, 500000.0
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def frequencies_of(scaling: dict | None) -> np.ndarray:
    config = tiny_config(head_dim=HEAD_DIM, rope_theta=THETA, rope_scaling=scaling)
    return inverse_frequencies(config)


def unscaled() -> list[float]:
    return [THETA ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)]


def llama3(frequency: float) -> float:
    """By wavelengths, as Meta's code puts it."""
    length, wavelength = LLAMA3["original_max_position_embeddings"], 2 * math.pi / frequency
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    if wavelength < length / high:
        return frequency
    if wavelength > length / low:
        return frequency / LLAMA3["factor"]
    smooth = (length / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / LLAMA3["factor"] + smooth * frequency


def test_unscaled_frequencies_are_powers_of_theta():
    got = frequencies_of(None)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, unscaled(), rtol=1e-6)


def test_linear_scaling_divides_every_frequency():
    got = frequencies_of({"rope_type": "linear", "factor": 4.0})
    np.testing.assert_allclose(got, np.array(unscaled()) / 4, rtol=1e-6)


def test_llama3_keeps_short_waves_divides_long_ones_and_blends_between():
    want = [llama3(frequency) for frequency in unscaled()]
    ratios = np.array(want) / unscaled()
    assert (ratios == 1).any() and (ratios == 1 / 8).any()
    assert ((ratios > 1 / 8) & (ratios < 1)).any()
    np.testing.assert_allclose(frequencies_of(LLAMA3), want, rtol=1e-5)


def test_frequency_factors_divide_each_frequency_by_its_own():
    factors = np.linspace(1, 3, HEAD_DIM // 2)
    scaling = {"rope_type": "frequency_factors", "frequency_factors": factors.tolist()}
    np.testing.assert_allclose(frequencies_of(scaling), unscaled() / factors, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotation_turns_each_pair_by_position_times_frequency(dtype):
    positions = np.array([0, 1, 7, 130], np.int32)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3, HEAD_DIM)), dtype)
    frequencies = frequencies_of(LLAMA3)
    got = rotate(x, *rotary_angles(jnp.asarray(positions), frequencies))
    assert got.dtype == x.dtype
    exact, half = np.asarray(x, np.float64), HEAD_DIM // 2
    pairs = exact[..., :half] + 1j * exact[..., half:]
    turned = pairs * np.exp(1j * positions[:, None, None] * frequencies.astype(np.float64))
    want = np.concatenate([turned.real, turned.imag], axis=-1)
    tolerance = {"float32": 5e-5, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=tolerance)


def test_a_product_of_rotated_heads_depends_on_their_distance_alone():
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, HEAD_DIM)), jnp.float32) for _ in range(2))

    def product(q_position: int, k_position: int) -> float:
        angles = [
            rotary_angles(jnp.array([p]), frequencies_of(None)) for p in (q_position, k_position)
        ]
        return float(jnp.vdot(rotate(q, *angles[0]), rotate(k, *angles[1])))

    assert product(9, 5) == pytest.approx(product(104, 100), abs=1e-3)
    assert product(9, 5) != pytest.approx(product(104, 101), abs=1e-2)
