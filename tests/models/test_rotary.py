"""Rotary angles and their scalings against the formulas in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.errors import ModelLoadError
from models.rotary import inverse_frequencies, rotary_angles
from pallas_kernels.fused import xla_fused
from tests.models.tiny_models import tiny_config

HEAD_DIM, THETA = 64, 500000.0
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    return xla_fused.rotate(x, cos[:, None], sin[:, None])


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


def test_yarn_divides_slow_turns_keeps_quick_ones_and_ramps_between():
    # Transformers 5.24 gives these for dimension 16, theta 10000, factor 4, 64 positions.
    config = tiny_config(
        head_dim=16, rope_theta=10000.0, rope_scaling={"rope_type": "yarn", "factor": 4.0}
    )
    quick, ramp = [1.0, 0.237170815, 0.05], [0.00790569466]
    slow = [0.0025, 0.000790569466, 0.00025, 0.0000790569466]
    np.testing.assert_allclose(inverse_frequencies(config), quick + ramp + slow, rtol=1e-6)
    assert math.isclose(config.rope_scaling.attention_factor, 0.1 * math.log(4) + 1)


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [1.0, 4.0, 9.0, 16.0],
    "original_max_position_embeddings": 100,
}


def phi3(**changes):
    rope = {"head_dim": 8, "rope_theta": THETA, "rope_scaling": LONGROPE}
    rope |= {"max_position_embeddings": 1000, "original_max_position_embeddings": None}
    return tiny_config(architectures=["Phi3ForCausalLM"], **(rope | changes))


@pytest.mark.parametrize(
    ("max_model_len", "name"), [(100, "short_factor"), (101, "long_factor"), (None, "long_factor")]
)
def test_longrope_chooses_its_factors_by_the_longest_sequence(max_model_len, name):
    config = phi3()
    if max_model_len is not None:
        config = config.for_length(max_model_len)
    unscaled = np.array([THETA ** (-2 * i / 8) for i in range(4)])
    want = unscaled / np.array(LONGROPE[name])
    np.testing.assert_allclose(inverse_frequencies(config), want, rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ({}, math.sqrt(1 + math.log(10) / math.log(100))),
        ({"factor": 4.0}, math.sqrt(1 + math.log(4) / math.log(100))),
        ({"factor": 1.0}, 1.0),
        ({"attention_factor": 1.5}, 1.5),
    ],
)
def test_longrope_stretches_cosine_and_sine(given, want):
    scaling = phi3(rope_scaling=LONGROPE | given).for_length(50).rope_scaling
    assert math.isclose(scaling.attention_factor, want)
    cos, sin = rotary_angles(jnp.array([3]), np.array([0.5], np.float32), want)
    np.testing.assert_allclose(cos.ravel(), want * math.cos(1.5), rtol=1e-6)
    np.testing.assert_allclose(sin.ravel(), want * math.sin(1.5), rtol=1e-6)


def test_the_original_length_beside_the_scaling_wins_as_in_transformers():
    assert phi3().rope_scaling.original_max_position_embeddings == 100
    config = phi3(original_max_position_embeddings=50)
    assert config.rope_scaling.original_max_position_embeddings == 50


def test_phi3s_old_name_of_longrope_is_read():
    assert phi3(rope_scaling=LONGROPE | {"rope_type": "su"}) == phi3()


@pytest.mark.parametrize("place", ["config", "rope_scaling"])
def test_a_share_of_the_dimensions_is_rotated_and_the_rest_kept(place):
    partial = {"partial_rotary_factor": 0.5}
    scaling = {"rope_type": "default"} | (partial if place == "rope_scaling" else {})
    config = phi3(rope_scaling=scaling, **(partial if place == "config" else {}))
    frequencies = inverse_frequencies(config)
    np.testing.assert_allclose(frequencies, [1, THETA**-0.5], rtol=1e-6)
    x = jnp.arange(8.0)[None, None]
    got = rotate(x, *rotary_angles(jnp.array([5]), frequencies))
    whole = rotate(x[..., :4], *rotary_angles(jnp.array([5]), frequencies))
    np.testing.assert_array_equal(got[..., :4], whole)
    np.testing.assert_array_equal(got[..., 4:], x[..., 4:])


@pytest.mark.parametrize("factor", [0.1, 0.4, 1.5])
def test_a_share_that_is_no_even_number_of_dimensions_is_refused(factor):
    with pytest.raises(ModelLoadError, match="partial_rotary_factor must rotate an even number"):
        phi3(partial_rotary_factor=factor)
