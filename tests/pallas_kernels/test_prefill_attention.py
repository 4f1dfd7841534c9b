"""The Mosaic GPU prefill kernel: interpreted, lowered for CUDA, and (mark gpu) run."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.decode_as_prefill import decode_attention
from pallas_kernels.attention.paged_inputs import PrefillTiles
from pallas_kernels.attention.prefill_attention import prefill_attention, prefill_tiles
from pallas_kernels.attention.tuning import PrefillTuningConfig, prefill_tuning
from tests.pallas_kernels.paged_cases import (
    PagedCase,
    PagedInputs,
    assert_matches_reference,
    make_inputs,
)

INTERPRETED = [
    PagedCase((1, 100, 29), (40, 170, 29), heads=(4, 2, 128), padding=6, first_row=1),
    PagedCase((70, 0, 3), (270, 0, 3), heads=(3, 1, 64), page_size=64, window=40, cap=5.0),
    PagedCase((70, 9), (70, 139), heads=(2, 2, 256), page_size=128, dtype="float16"),
]
SCHEDULES = [
    {"ping_pong": False, "compute_warpgroups": 1},
    {"ping_pong": False},
    {"ping_pong": True},
]
# Alone, the long row's first token is content with half of the last block; its tile is not.
INVARIANT = [
    PagedCase((9, 91), (93, 241), heads=(2, 1, 64)),  # two heads a tile
    PagedCase((91, 9), (241, 139), heads=(3, 1, 64), page_size=64, window=130, cap=5.0),
]
# T, (N, K, H), page size, options, changed fields
LOWERED = [
    (512, (32, 8, 128), 16, {}, {}),
    (12, (32, 8, 128), 16, {}, {}),
    (512, (16, 8, 128), 64, {"sliding_window": 512}, {"ping_pong": False}),
    (512, (8, 8, 128), 32, {"is_one_position": True}, {}),
    (512, (32, 32, 64), 128, {"soft_cap": 30.0}, {}),
    (12, (9, 3, 64), 16, {}, {}),
    (512, (9, 3, 64), 32, {"sliding_window": 100}, {}),
    (12, (8, 1, 256), 64, {"sliding_window": 100, "soft_cap": 50.0}, {}),
    (512, (16, 8, 256), 128, {}, {}),
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


WITH_NAN = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")


def tuning_of(case: PagedCase, **changes) -> PrefillTuningConfig:
    """Of a kernel whose programs have several tiles each."""
    tuning = prefill_tuning(None, case.heads[2], case.dtype)
    return dataclasses.replace(tuning, num_programs=2, **changes)


def interpret(case: PagedCase, inputs: PagedInputs, tuning: PrefillTuningConfig, *more):
    return prefill_attention(
        *inputs,
        jnp.array([case.first_row]),
        *more,
        interpret=plgpu.InterpretGPUParams(),
        tuning=tuning,
        **case.options,
    )


def cut(inputs: PagedInputs, row: int, first: int, end: int) -> PagedInputs:
    """The queries `[first, end)` of a row, and no others."""
    start, stop = (int(inputs.query_start_loc[index]) for index in (row, row + 1))
    return inputs._replace(
        q=inputs.q[start + first : start + end],
        page_table=inputs.page_table[row : row + 1],
        seq_lens=inputs.seq_lens[row : row + 1] - (stop - start - end),
        query_start_loc=jnp.array([0, end - first], jnp.int32),
    )


def assert_bits_do_not_depend_on_neighbours(case: PagedCase, how: dict[str, Any]) -> None:
    """Of the longest row's tokens within the batch, alone and in another chunk; all by decode."""
    inputs, starts = make_inputs(case), np.cumsum((0, *case.num_queries))
    got = prefill_attention(*inputs, jnp.array([0]), **how, **case.options)
    assert_matches_reference(got, case, inputs)
    count, row = max((count, row) for row, count in enumerate(case.num_queries))
    for first, end in ((0, 1), (count // 2, count // 2 + 1), (count // 4, count)):
        part = cut(inputs, row, first, end)
        alone = prefill_attention(*part, jnp.array([0]), **how, **case.options)
        assert (alone == got[starts[row] + first : starts[row] + end]).all()
    newest = inputs._replace(q=inputs.q[starts[1:] - 1])
    decoded = decode_attention(*newest[:6], **how, **case.options)
    assert (decoded == got[starts[1:] - 1]).all()


@WITH_NAN
@pytest.mark.parametrize("case", INTERPRETED)
def test_interpreted_kernel_matches_the_reference(case):
    inputs = make_inputs(case)
    got = interpret(case, inputs, tuning_of(case))
    assert_matches_reference(got, case, inputs)


@WITH_NAN
def test_a_batch_of_decode_rows_alone_passes_through():
    case = PagedCase((1, 1, 1), (4, 66, 5), padding=5, heads=(2, 1, 64), first_row=3)
    decoded = jnp.arange(3 * 2 * 64, dtype=jnp.bfloat16).reshape(3, 2, 64)
    got = interpret(case, make_inputs(case), tuning_of(case), decoded)
    assert (got[:3] == decoded).all() and not got[3:].any()


@WITH_NAN
@pytest.mark.parametrize("changes", SCHEDULES)
def test_every_schedule_matches_and_results_of_decode_rows_pass_through(changes):
    case = PagedCase((1, 66, 1), (4, 66, 5), heads=(2, 1, 64), page_size=32, padding=3, first_row=1)
    inputs, tuning = make_inputs(case), tuning_of(case, block_tokens=64, num_stages=2, **changes)
    decoded = jnp.full((3, 2, 64), 7, jnp.bfloat16)
    first_row = jnp.array([case.first_row])
    tiles = prefill_tiles(
        inputs.query_start_loc,
        first_row,
        inputs.seq_lens,
        num_tokens=inputs.q.shape[0],
        head_dim=64,
        dtype=inputs.q.dtype,
        group=2,
        tuning=tuning,
    )
    got = interpret(case, inputs, tuning, decoded, tiles)
    assert (got[0] == 7).all()
    assert_matches_reference(got.at[0].set(0), case, inputs)


@WITH_NAN
@pytest.mark.parametrize("case", INVARIANT)
def test_bits_of_a_token_do_not_depend_on_its_neighbours(case):
    how = {"interpret": plgpu.InterpretGPUParams(), "tuning": tuning_of(case)}
    assert_bits_do_not_depend_on_neighbours(case, how)


@pytest.mark.parametrize(("num_tokens", "heads", "page_size", "options", "changes"), LOWERED)
def test_kernel_lowers_for_cuda(num_tokens, heads, page_size, options, changes):
    num_heads, num_kv_heads, head_dim = heads
    q = jnp.zeros((num_tokens, num_heads, head_dim), jnp.bfloat16)
    pages = jnp.zeros((1, 4, page_size, num_kv_heads, head_dim), jnp.bfloat16)
    ints = [jnp.zeros(n, jnp.int32) for n in (1, (4, 4096 // page_size), 4, 5, 1)]
    tuning = dataclasses.replace(prefill_tuning(None, head_dim, q.dtype), **changes)
    run = jax.jit(lambda *args: prefill_attention(*args, scale=0.1, tuning=tuning, **options))
    lowered = run.trace(q, pages, pages, *ints, q[:4]).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_float32_pages_are_refused():
    case = PagedCase((20,), (20,), dtype="float32")
    with pytest.raises(ValueError, match="bfloat16 or both float16; got float32"):
        prefill_attention(*make_inputs(case), jnp.array([0]), **case.options)


def test_other_arguments_that_do_not_fit_are_refused():
    case = PagedCase((20,), (20,))
    inputs, first_row = make_inputs(case), jnp.array([0])
    with pytest.raises(ValueError, match="scale must be positive; got -1"):
        prefill_attention(*inputs, first_row, scale=-1.0)
    with pytest.raises(ValueError, match=r"decoded must be \[D, 4, 64\] bfloat16; got .*float32"):
        prefill_attention(*inputs, first_row, jnp.zeros((2, 4, 64)), scale=1.0)
    tiles = PrefillTiles(jnp.zeros((9, 5), jnp.int32), jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match=r"tiles must be made for q: \(1, 5\); got .*\(9, 5\)"):
        prefill_attention(*inputs, first_row, None, tiles, scale=1.0)


def test_warpgroups_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="compute_warpgroups must be 1 or 2; got 3"):
        PrefillTuningConfig(block_tokens=64, num_stages=2, compute_warpgroups=3)
    with pytest.raises(ValueError, match="must be 2 with ping_pong; got compute_warpgroups=1"):
        PrefillTuningConfig(block_tokens=64, num_stages=2, ping_pong=True, compute_warpgroups=1)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU)
def test_kernel_on_a_gpu_matches_the_reference(case):
    inputs = make_inputs(case)
    got = prefill_attention(*inputs, jnp.array([case.first_row]), **case.options)
    assert_matches_reference(got, case, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*INVARIANT, *ON_GPU[2:]])
def test_on_a_gpu_bits_of_a_token_do_not_depend_on_its_neighbours(case):
    assert_bits_do_not_depend_on_neighbours(case, {})
