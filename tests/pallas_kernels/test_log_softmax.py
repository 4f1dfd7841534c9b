"""The log-softmax kernel: right, and the same bits for a row in any company."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sampling.log_softmax import log_softmax
from pallas_kernels.sampling.sampling_passes import SamplingTuningConfig

TUNING = SamplingTuningConfig(warpgroups=2, tile_lines=4, num_stages=2)


def interpret(logits):
    return np.asarray(log_softmax(logits, interpret=plgpu.InterpretGPUParams(), tuning=TUNING))


def test_it_is_the_log_softmax_and_rows_do_not_depend_on_each_other():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((3, 1100)) * 8, jnp.float32)
    logits = logits.at[0, 7].set(-jnp.inf)
    got = interpret(logits)
    np.testing.assert_allclose(got, jax.nn.log_softmax(logits), rtol=1e-6, atol=2e-6)
    np.testing.assert_array_equal(interpret(logits[1:2]), got[1:2])


def test_a_nan_spoils_its_own_row_alone():
    logits = jnp.zeros((2, 600)).at[1, 3].set(jnp.nan)
    got = interpret(logits)
    assert np.isnan(got[1]).all()
    np.testing.assert_allclose(got[0], -np.log(600), rtol=1e-6)


@pytest.mark.parametrize("num_rows", [1, 256])
def test_it_lowers_for_cuda(num_rows):
    traced = jax.jit(log_softmax).trace(jax.ShapeDtypeStruct((num_rows, 151936), jnp.float32))
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("logits", [np.zeros((2, 3), np.float16), np.zeros(3, np.float32)])
def test_other_arrays_are_refused(logits):
    with pytest.raises(ValueError, match=r"logits must be float32\[S, V\]; got float"):
        log_softmax(jnp.asarray(logits))


@pytest.mark.gpu
def test_on_a_gpu_rows_have_the_same_bits_in_any_company():
    logits = jax.random.normal(jax.random.key(0), (256, 151936)) * 5
    everyone = np.asarray(log_softmax(logits))
    np.testing.assert_allclose(everyone, jax.nn.log_softmax(logits), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(log_softmax(logits[17:18])), everyone[17:18])
