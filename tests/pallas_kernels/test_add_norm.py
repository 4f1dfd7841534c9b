"""The fused residual sum and norm: jnp version, interpreted, lowered for CUDA, and (gpu) run."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fused import xla_fused
from pallas_kernels.fused.add_norm import (
    AddNormTuning,
    add_norm,
    choose_add_norm_tuning,
    fits_add_norm,
)

LAYER = jnp.array([1], jnp.int32)
INTERPRET = plgpu.InterpretGPUParams()
HIDDEN_SIZES = [576, 896, 960, 1024, 1536, 2048, 2304, 3072, 3584, 4096, 5120, 8192]

# tokens, width, parts (0 = whole, None = no delta), Gemma's norms, warpgroups a token, dtype
SMALL = [
    (3, 96, 0, False, None, "bfloat16"),
    (5, 256, 2, True, 0, "float16"),
    (2, 256, None, False, 1, "bfloat16"),
    (2, 512, 3, True, 2, "bfloat16"),
]
LARGE = [
    (8, 4096, 8, False, None, "bfloat16"),
    (77, 576, 2, True, None, "float16"),
    (1030, 3584, 0, True, None, "bfloat16"),
]


def random(seed: int, *shape: int, dtype: str = "bfloat16") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def make_inputs(
    tokens, width, parts, is_gemma, dtype
) -> tuple[tuple[Any, Any, Any, jax.Array], dict[str, Any]]:
    """The arguments, and the options that both versions take."""
    delta = None
    if parts is not None:
        delta = random(1, tokens, width, dtype=dtype)
    if parts:
        delta = random(1, parts, tokens, width, dtype="float32")
    gains = random(2, 3, width, dtype=dtype)
    options: dict[str, Any] = {"eps": 1e-5, "gain_offset": 1.0 if is_gemma else 0.0}
    if is_gemma:
        options["delta_gains"] = random(3, 3, width, dtype=dtype) if parts is not None else None
    return (random(0, tokens, width, dtype=dtype), delta, gains, LAYER), options


def assert_close(got, want):
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        eps = float(jnp.finfo(y.dtype).eps)
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, rtol=2 * eps, atol=eps)


@pytest.mark.parametrize("case", SMALL)
def test_interpreted_kernel_matches_the_jnp_version(case):
    args, options = make_inputs(*case[:4], dtype=case[5])
    warpgroups = case[4]
    tuning = None if warpgroups is None else AddNormTuning(warpgroups=warpgroups)
    got = add_norm(*args, interpret=INTERPRET, tuning=tuning, **options)
    assert_close(got, xla_fused.add_norm(*args, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE)
def test_kernel_matches_the_jnp_version_on_a_gpu(case):
    args, options = make_inputs(*case[:4], dtype=case[5])
    got = add_norm(*args, **options)
    assert_close(got, xla_fused.add_norm(*args, **options))


def test_a_delta_is_normalised_before_it_is_added():
    (x, delta, gains, _), options = make_inputs(7, 64, 0, True, "float32")

    def norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        root = np.sqrt((x**2).mean(-1, keepdims=True) + options["eps"])
        return x / root * (options["gain_offset"] + gain)

    got = xla_fused.add_norm(x, delta, gains, LAYER, **options)
    x, delta, gains, delta_gains = (
        np.asarray(array, np.float64) for array in (x, delta, gains, options["delta_gains"])
    )
    want = x + norm(delta, delta_gains[1])
    np.testing.assert_allclose(got[0], want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[1], norm(want, gains[1]), rtol=1e-5, atol=1e-5)


def test_parts_are_summed_before_they_are_rounded():
    (x, delta, gains, _), _ = make_inputs(4, 32, 3, False, "bfloat16")
    whole = delta.sum(0).astype(x.dtype)
    got = xla_fused.add_norm(x, delta, gains, LAYER, eps=1e-5)
    np.testing.assert_array_equal(got[0], xla_fused.add_norm(x, whole, gains, LAYER, eps=1e-5)[0])


@pytest.mark.parametrize("num_tokens", [1, 8, 8192])
def test_every_hidden_size_lowers_for_cuda(num_tokens):
    struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    for width in HIDDEN_SIZES:
        delta = jax.ShapeDtypeStruct((4, num_tokens, width), jnp.float32)
        args = (struct((num_tokens, width)), delta, struct((3, width)), LAYER)
        lowered = add_norm.trace(*args, eps=1e-5).lower(lowering_platforms=("cuda",))
        assert "mosaic_gpu" in lowered.as_text()


def test_few_tokens_get_more_threads_than_many():
    assert choose_add_norm_tuning(8, 4096).warpgroups == 4
    assert choose_add_norm_tuning(8192, 4096).warpgroups == 1
    assert choose_add_norm_tuning(8192, 1024).warpgroups == 0


def test_what_does_not_fit_is_refused():
    args, options = make_inputs(4, 96, 2, False, "bfloat16")
    assert fits_add_norm(96) and not fits_add_norm(100) and not fits_add_norm(20480)
    assert fits_add_norm(16384) and not fits_add_norm(4128)
    with pytest.raises(ValueError, match="D must be a multiple of 128"):
        add_norm(random(0, 4, 100), None, random(1, 3, 100), LAYER, eps=1e-5)
    with pytest.raises(ValueError, match="must share D=96 evenly"):
        add_norm(*args, tuning=AddNormTuning(warpgroups=2), **options)
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        add_norm(args[0].astype("float32"), *args[1:], **options)
    for version in (add_norm, xla_fused.add_norm):
        with pytest.raises(ValueError, match=r"delta must be \[T, 96\]"):
            version(args[0], args[0].astype("float32"), *args[2:], **options)
        with pytest.raises(ValueError, match="must come with a delta"):
            version(args[0], None, *args[2:], delta_gains=args[2], **options)
