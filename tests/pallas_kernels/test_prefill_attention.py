"""The Mosaic GPU prefill kernel: interpreted, lowered for CUDA, and (mark gpu) run."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.tuning import prefill_tuning
from tests.pallas_kernels.paged_cases import PagedCase, assert_matches_reference, make_inputs

INTERPRETED = [
    PagedCase((1, 100, 29), (40, 170, 29), heads=(2, 1, 128), padding=6, first_row=1),
    PagedCase((70, 0, 3), (270, 0, 3), heads=(3, 1, 64), page_size=64, window=40, cap=5.0),
    PagedCase((70, 9), (70, 139), heads=(2, 2, 256), page_size=128, dtype="float16"),
]
# (N, K, H), page size, options
LOWERED = [
    ((32, 8, 128), 16, {}),
    ((16, 8, 128), 64, {"sliding_window": 512}),
    ((32, 32, 64), 128, {"soft_cap": 30.0}),
    ((9, 3, 64), 16, {}),
    ((8, 1, 256), 64, {"sliding_window": 100, "soft_cap": 50.0}),
    ((16, 8, 256), 128, {}),
]
ON_GPU = [
    PagedCase((1, 300, 29, 64), (40, 470, 29, 64), heads=(8, 2, 128), padding=6, first_row=1),
    PagedCase((1000, 1, 0, 77), (1000, 90, 0, 500), heads=(16, 8, 128), page_size=64),
    PagedCase((270, 9, 128), (700, 139, 128), heads=(9, 3, 64), dtype="float16"),
    PagedCase((500, 3), (500, 300), heads=(4, 4, 256), page_size=128),
    PagedCase((500, 33), (900, 300), heads=(8, 1, 128), page_size=32, cap=5.0),
    PagedCase((500, 33), (900, 300), heads=(4, 2, 64), window=100),
    PagedCase((500, 33), (900, 300), heads=(4, 2, 256), window=129, cap=3.0),
]


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("case", INTERPRETED)
def test_interpreted_kernel_matches_the_reference(case):
    inputs = make_inputs(case)
    tuning = prefill_tuning(None, case.heads[2], case.dtype)
    got = prefill_attention(
        *inputs,
        jnp.array([case.first_row]),
        interpret=plgpu.InterpretGPUParams(),
        tuning=dataclasses.replace(tuning, num_programs=2),  # several tiles a program
        **case.options,
    )
    assert_matches_reference(got, case, inputs)


@pytest.mark.parametrize(("heads", "page_size", "options"), LOWERED)
@pytest.mark.parametrize("num_tokens", [12, 512])
def test_kernel_lowers_for_cuda(heads, page_size, options, num_tokens):
    num_heads, num_kv_heads, head_dim = heads
    q = jnp.zeros((num_tokens, num_heads, head_dim), jnp.bfloat16)
    pages = jnp.zeros((1, 4, page_size, num_kv_heads, head_dim), jnp.bfloat16)
    ints = [jnp.zeros(n, jnp.int32) for n in (1, (4, 4096 // page_size), 4, 5, 1)]
    run = jax.jit(lambda *args: prefill_attention(*args, scale=0.1, **options))
    lowered = run.trace(q, pages, pages, *ints).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_float32_pages_are_refused():
    case = PagedCase((20,), (20,), dtype="float32")
    with pytest.raises(ValueError, match="bfloat16 or both float16; got float32"):
        prefill_attention(*make_inputs(case), jnp.array([0]), **case.options)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU)
def test_kernel_on_a_gpu_matches_the_reference(case):
    inputs = make_inputs(case)
    got = prefill_attention(*inputs, jnp.array([case.first_row]), **case.options)
    assert_matches_reference(got, case, inputs)
