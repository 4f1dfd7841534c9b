"""Decode by the prefill kernel: right, and bit for bit what a chunk gives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.decode_as_prefill import decode_attention
from pallas_kernels.attention.prefill_attention import prefill_attention
from pallas_kernels.attention.tuning import prefill_tuning
from tests.pallas_kernels.paged_cases import (
    PagedInputs,
    assert_matches_reference,
    decode_case,
    make_inputs,
)

CASES = [
    decode_case(140, 0, 3, 66, heads=(4, 2, 64)),
    decode_case(140, 0, 3, 0, heads=(3, 1, 64), window=40, cap=5.0),
]
WITH_NAN = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")


def tuning_of(case):
    tuning = prefill_tuning(None, case.heads[2], case.dtype)
    return dataclasses.replace(tuning, num_programs=2, block_tokens=64, num_stages=2)


def as_chunk(case, inputs: PagedInputs, row: int, num_before: int, place: int) -> np.ndarray:
    """The row's query as the last of a chunk of `num_before + 1`, after a row of `place` tokens."""
    rng = np.random.default_rng(1)
    q = rng.standard_normal((place + num_before + 1, *inputs.q.shape[1:]))
    q = jnp.asarray(q, case.dtype).at[-1].set(inputs.q[row])
    rows = jnp.array([0, row])
    out = prefill_attention(
        q,
        *inputs[1:4],
        inputs.page_table[rows],
        inputs.seq_lens[rows],
        jnp.array([0, place, len(q)], jnp.int32),
        jnp.zeros(1, jnp.int32),
        interpret=plgpu.InterpretGPUParams(),
        tuning=tuning_of(case),
        **case.options,
    )
    return np.asarray(out[-1], np.float32)


@WITH_NAN
@pytest.mark.parametrize("case", CASES)
def test_a_decode_row_has_the_bits_of_a_chunks_last_token(case):
    inputs = make_inputs(case)
    table = inputs.page_table.at[1, 0].set(0)  # rows without tokens point at the null page
    got = decode_attention(
        *inputs[:4],
        table,
        inputs.seq_lens,
        interpret=plgpu.InterpretGPUParams(),
        tuning=tuning_of(case),
        **case.options,
    )
    assert_matches_reference(got, case, inputs)
    for num_before, place in ((0, 5), (70, 9)):
        chunk = as_chunk(case, inputs, 0, num_before, place)
        np.testing.assert_array_equal(chunk, np.asarray(got[0], np.float32))


@pytest.mark.parametrize(("N", "K", "H"), [(32, 8, 128), (16, 8, 128), (8, 1, 256), (9, 3, 64)])
@pytest.mark.parametrize("num_rows", [1, 256])
def test_it_lowers_for_cuda(N, K, H, num_rows):
    q = jnp.zeros((num_rows, N, H), jnp.bfloat16)
    pages = jnp.zeros((1, 4, 16, K, H), jnp.bfloat16)
    ints = [jnp.zeros(n, jnp.int32) for n in (1, (num_rows, 256), num_rows)]
    run = jax.jit(lambda *args: decode_attention(*args, scale=0.1, sliding_window=512))
    traced = run.trace(q, pages, pages, *ints)
    assert traced.out_info.shape == q.shape
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64), (8, 4, 256)])
def test_on_a_gpu_decode_rows_have_the_bits_of_chunks(heads, window):
    case = decode_case(900, 33, 0, 470, 129, heads=heads, window=window)
    inputs = make_inputs(case)
    table = inputs.page_table.at[2, 0].set(0)
    got = decode_attention(*inputs[:4], table, inputs.seq_lens, **case.options)
    assert_matches_reference(got, case, inputs)
    for num_before, place in ((0, 5), (70, 9), (300, 1)):
        rng = np.random.default_rng(1)
        q = rng.standard_normal((place + num_before + 1, *inputs.q.shape[1:]))
        q = jnp.asarray(q, case.dtype).at[-1].set(inputs.q[0])
        rows = jnp.array([3, 0])
        starts = jnp.array([0, place, len(q)], jnp.int32)
        out = prefill_attention(
            q,
            *inputs[1:4],
            inputs.page_table[rows],
            inputs.seq_lens[rows],
            starts,
            jnp.zeros(1, jnp.int32),
            **case.options,
        )
        np.testing.assert_array_equal(
            np.asarray(out[-1], np.float32), np.asarray(got[0], np.float32)
        )
