"""The fused gated activation: jnp version, interpreted, lowered for CUDA, and (gpu) run."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fused import xla_fused
from pallas_kernels.fused.fused_inputs import total
from pallas_kernels.fused.gated_activation import (
    GatedActivationTuning,
    fits_gated_activation,
    gated_activation,
)

INTERPRET = plgpu.InterpretGPUParams()
MLP_SIZES = [1536, 3072, 4864, 8960, 9216, 14336, 18944]
SMALL_TILES = GatedActivationTuning(rows=8, columns=512)

# tokens, width, parts (0 = whole), activation, dtype, tuning
SMALL = [
    (3, 96, 0, "silu", "bfloat16", None),
    (5, 264, 2, "gelu_tanh", "float16", None),
    (9, 640, 0, "silu", "bfloat16", SMALL_TILES),
    (1, 256, 3, "gelu_tanh", "bfloat16", None),
]
LARGE = [
    (8, 14336, 8, "silu", "bfloat16", None),
    (77, 8960, 0, "gelu_tanh", "float16", None),
    (1030, 3080, 0, "silu", "bfloat16", None),
]


def make_inputs(tokens, width, parts, activation, dtype) -> tuple[Any, dict[str, Any]]:
    """gate_up, and the options that both versions take."""
    rng = np.random.default_rng(0)
    shape = (parts, tokens, 2 * width) if parts else (tokens, 2 * width)
    gate_up = jnp.asarray(3 * rng.normal(size=shape), "float32" if parts else dtype)
    options: dict[str, Any] = {"activation": activation, "dtype": dtype}
    return gate_up, options


def assert_is_rounded_truth(got, gate_up, options):
    """What float32 gives, up to the rounding of the activated gate and of the product."""
    dtype = options["dtype"]
    whole = total(gate_up, 2, dtype).astype(jnp.float32)
    want = xla_fused.gated_activation(whole, activation=options["activation"], dtype="float32")
    assert got.dtype == jnp.dtype(dtype)
    eps = float(jnp.finfo(dtype).eps)
    # The float32 GELU itself loses what 1 + tanh cancels.
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=1.5 * eps, atol=1e-5)


@pytest.mark.parametrize("case", SMALL)
def test_interpreted_kernel_gives_the_rounded_truth(case):
    gate_up, options = make_inputs(*case[:-1])
    got = gated_activation(gate_up, interpret=INTERPRET, tuning=case[-1], **options)
    assert_is_rounded_truth(got, gate_up, options)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE)
def test_kernel_gives_the_rounded_truth_on_a_gpu(case):
    gate_up, options = make_inputs(*case[:-1])
    got = gated_activation(gate_up, **options)
    assert_is_rounded_truth(got, gate_up, options)


def test_large_gates_neither_overflow_nor_lose_their_sign():
    gate = jnp.array([[-1e4, -200, 0, 200, 1e4, 30, -30, -3] * 4], jnp.bfloat16)
    gate_up = jnp.concatenate([gate, jnp.ones_like(gate)], axis=1)
    got = gated_activation(gate_up, activation="silu", dtype="bfloat16", interpret=INTERPRET)
    assert_is_rounded_truth(got, gate_up, {"activation": "silu", "dtype": "bfloat16"})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("activation", "function"),
    [("silu", jax.nn.silu), ("gelu_tanh", functools.partial(jax.nn.gelu, approximate=True))],
)
def test_jnp_version_is_bit_equal_to_the_gated_mlp(activation, function, dtype):
    gate_up, options = make_inputs(6, 48, 0, activation, dtype)
    got = xla_fused.gated_activation(gate_up, **options)
    np.testing.assert_array_equal(got, function(gate_up[:, :48]) * gate_up[:, 48:])


@pytest.mark.parametrize("num_tokens", [1, 8, 8192])
def test_every_mlp_size_lowers_for_cuda(num_tokens):
    for width in MLP_SIZES:
        gate_up = jax.ShapeDtypeStruct((num_tokens, 2 * width), jnp.bfloat16)
        traced = gated_activation.trace(gate_up, activation="silu", dtype="bfloat16")
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_what_does_not_fit_is_refused():
    gate_up, options = make_inputs(4, 96, 2, "silu", "bfloat16")
    assert fits_gated_activation(264) and not fits_gated_activation(260)
    with pytest.raises(ValueError, match="F must be a multiple of 8"):
        gated_activation(gate_up[..., :20], activation="silu", dtype="bfloat16")
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        gated_activation(gate_up, activation="silu", dtype="float32")
    with pytest.raises(ValueError, match="power of two"):
        GatedActivationTuning(rows=3, columns=256)
    for version in (gated_activation, xla_fused.gated_activation):
        with pytest.raises(ValueError, match="silu or gelu_tanh"):
            version(gate_up, **{**options, "activation": "relu"})
        with pytest.raises(ValueError, match="as much gate as up"):
            version(gate_up[..., :191], activation="silu", dtype="bfloat16")
