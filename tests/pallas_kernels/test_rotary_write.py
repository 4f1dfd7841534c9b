"""The fused rotary embedding and write: jnp version, interpreted, lowered, and (gpu) run."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fused import xla_fused
from pallas_kernels.fused.kv_write import write_by_loop, write_by_scatter
from pallas_kernels.fused.rotary_write import RotaryWriteTuning, fits_rotary_write, rotary_write

INTERPRET = plgpu.InterpretGPUParams()
LAYER, CACHE_LAYER = jnp.array([2], jnp.int32), jnp.array([1], jnp.int32)
PAGES, PAGE_SIZE = 12, 4


def make_inputs(
    tokens, heads, sizes, *, parts=0, bias=False, norm=False, dtype="bfloat16"
) -> tuple[Any, dict[str, Any]]:
    """Arguments and options of both versions; sizes = (head dim, rotary dim, stored head dim)."""
    (K, G), (H, rotary_dim, stored) = heads, sizes
    width = K * (G + 2) * H
    rng = np.random.default_rng(0)

    def random(*shape, dtype=dtype):
        return jnp.asarray(rng.normal(size=shape), dtype)

    qkv = random(parts, tokens, width, dtype="float32") if parts else random(tokens, width)
    pages = [random(2, PAGES, PAGE_SIZE, K, stored) for _ in "kv"]
    slots = rng.permutation(np.arange(PAGE_SIZE, PAGES * PAGE_SIZE))[:tokens]
    angles = rng.normal(size=(tokens, rotary_dim // 2))
    cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    options = {"num_kv_heads": K, "head_dim": H, "eps": 1e-6, "gain_offset": 1.0 * norm}
    if bias:
        options["bias"] = random(3, width)
    if norm:
        options["q_gains"], options["k_gains"] = random(3, H), random(3, H)
    slots = jnp.asarray(slots, jnp.int32)
    return (qkv, *pages, LAYER, CACHE_LAYER, slots, cos, sin), options


def assert_close(got, want):
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        eps = float(jnp.finfo(y.dtype).eps)
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, rtol=2 * eps, atol=eps)


@pytest.mark.parametrize(
    ("case", "fields", "tuning"),
    [
        ((8, (2, 1), (32, 32, 64)), {}, None),
        ((3, (1, 2), (64, 32, 64)), {"parts": 2, "bias": True, "norm": True}, (1, 1)),
        ((3, (3, 2), (48, 32, 64)), {"dtype": "float16", "norm": True}, (2, 2)),
    ],
)
def test_interpreted_kernel_matches_the_jnp_version(case, fields, tuning):
    args, options = make_inputs(*case, **fields)
    if tuning is not None:
        tuning = RotaryWriteTuning(query_heads=tuning[0], written_tokens=tuning[1])
    got = rotary_write(*args, interpret=INTERPRET, tuning=tuning, **options)
    assert_close(got, xla_fused.rotary_write(*args, write=write_by_loop, **options))


def test_kv_heads_in_turn_have_the_same_bits():
    args, options = make_inputs(5, (4, 2), (32, 32, 64), bias=True, norm=True)
    got, want = (
        rotary_write(
            *args,
            interpret=INTERPRET,
            tuning=RotaryWriteTuning(query_heads=2, written_tokens=1, query_kv_heads=in_turn),
            **options,
        )
        for in_turn in (2, 1)
    )
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [0, 4])
@pytest.mark.parametrize("heads", [(8, 4), (2, 7), (3, 3)])
def test_kernel_matches_the_jnp_version_on_a_gpu(heads, parts):
    args, options = make_inputs(33, heads, (128, 128, 128), parts=parts, norm=True, bias=True)
    got = rotary_write(*args, **options)
    assert_close(got, xla_fused.rotary_write(*args, write=write_by_scatter, **options))


@pytest.mark.parametrize(
    ("write", "dtype"), [(write_by_loop, "float32"), (write_by_scatter, "bfloat16")]
)
def test_jnp_version_is_norm_then_rotation_then_the_write(write, dtype):
    sizes = H, _, stored = 12, 8, 16
    args, options = make_inputs(7, (2, 3), sizes, bias=True, norm=True, dtype=dtype)
    qkv, k_pages, v_pages, _, _, slots, cos, sin = args
    heads = (qkv + options["bias"][2]).reshape(7, 2, 5, H)
    q, k, v = heads[:, :, :-2].reshape(7, -1, H), heads[:, :, -2], heads[:, :, -1]

    def normalise(x, gains):
        rows = x.reshape(-1, H)
        return xla_fused.add_norm(rows, None, gains, LAYER, eps=1e-6, gain_offset=1)[1].reshape(
            x.shape
        )

    q, k = (
        xla_fused.rotate(normalise(x, options[name]), cos[:, None], sin[:, None])
        for x, name in ((q, "q_gains"), (k, "k_gains"))
    )
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, stored - H))) for x in (q, k, v))
    got = xla_fused.rotary_write(*args, write=write, **options)
    want = q, write(k_pages, CACHE_LAYER, slots, k), write(v_pages, CACHE_LAYER, slots, v)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)


def lower_for_cuda(tokens, heads, sizes):
    (K, G), (H, rotary_dim, stored) = heads, sizes
    struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    angles = jax.ShapeDtypeStruct((tokens, rotary_dim // 2), jnp.float32)
    args = (
        struct((tokens, K * (G + 2) * H)), struct((4, 1000, 16, K, stored)),
        struct((4, 1000, 16, K, stored)), LAYER, CACHE_LAYER,
        jax.ShapeDtypeStruct((tokens,), jnp.int32), angles, angles,
    )  # fmt: skip
    call = functools.partial(rotary_write, num_kv_heads=K, head_dim=H)
    traced = jax.jit(call, donate_argnums=(1, 2)).trace(*args)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("num_tokens", [1, 8, 8192])
@pytest.mark.parametrize(
    ("heads", "sizes"),
    [
        ((8, 2), (128, 128, 128)),
        ((2, 7), (64, 64, 64)),
        ((32, 1), (96, 96, 128)),
        ((8, 3), (128, 96, 128)),
        ((4, 2), (256, 256, 256)),
        ((3, 3), (64, 64, 64)),
        ((32, 1), (80, 80, 128)),
    ],
)
def test_every_head_shape_lowers_for_cuda_and_updates_the_pages_in_place(heads, sizes, num_tokens):
    text = lower_for_cuda(num_tokens, heads, sizes)
    [kernel] = [line for line in text.splitlines() if "mosaic_gpu" in line]
    # Keys and values: outputs 1 and 2 of the kernel are its last two operands.
    for output, operand in ((1, 6), (2, 7)):
        assert f"output_tuple_indices = [{output}], operand_index = {operand}" in kernel
    assert text.count("tf.aliasing_output") + text.count("jax.buffer_donor") == 2


def test_what_does_not_fit_is_refused():
    args, options = make_inputs(4, (2, 2), (32, 32, 64))
    qkv, k_pages, v_pages, *rest = args
    assert fits_rotary_write(96, 96, 128) and not fits_rotary_write(96, 20, 128)
    with pytest.raises(ValueError, match="multiples of 8"):
        rotary_write(*args[:-2], args[-2][:, :10], args[-1][:, :10], **options)
    with pytest.raises(ValueError, match="must divide 2"):
        rotary_write(*args, tuning=RotaryWriteTuning(query_heads=3, written_tokens=1), **options)
    tuning = RotaryWriteTuning(query_heads=1, written_tokens=1, query_kv_heads=3)
    with pytest.raises(ValueError, match="query_kv_heads must divide 2"):
        rotary_write(*args, tuning=tuning, **options)
    versions = (rotary_write, functools.partial(xla_fused.rotary_write, write=write_by_loop))
    for version in versions:
        with pytest.raises(ValueError, match="come together"):
            version(*args, q_gains=jnp.ones((3, 32), "bfloat16"), **options)
        with pytest.raises(ValueError, match="v_pages must be"):
            version(qkv, k_pages, v_pages[:1], *rest, **options)
        with pytest.raises(ValueError, match=r"qkv must be \[T"):
            version(qkv[:, :100], k_pages, v_pages, *rest, **options)
        with pytest.raises(ValueError, match="at least 32"):
            version(qkv, k_pages[..., :16], v_pages[..., :16], *rest, **options)
