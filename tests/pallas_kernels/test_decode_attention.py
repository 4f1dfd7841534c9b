"""The Mosaic GPU decode kernel: interpreted, lowered for CUDA, and (mark gpu) run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.decode_attention import decode_attention
from pallas_kernels.attention.decode_plan import plan_decode
from pallas_kernels.attention.tuning import DecodeTuningConfig, decode_tuning
from tests.pallas_kernels.paged_cases import assert_matches_reference, decode_case, make_inputs

INTERPRETED = [
    decode_case(100, 0, heads=(4, 2, 128)),
    decode_case(300, heads=(3, 1, 64), window=70, cap=5.0, page_size=32),
    decode_case(200, heads=(2, 2, 256), page_size=128, dtype="float16"),
]
# (N, K, H), page size, options
LOWERED = [
    ((32, 8, 128), 16, {}),
    ((16, 8, 128), 64, {"sliding_window": 512}),
    ((32, 32, 64), 128, {"soft_cap": 30.0}),
    ((9, 3, 64), 16, {"split_tokens": 256}),
    ((8, 1, 256), 64, {"sliding_window": 100, "soft_cap": 50.0, "split_tokens": 1024}),
    ((16, 8, 256), 128, {}),
    ((64, 1, 128), 32, {"split_tokens": 128}),
]
ON_GPU = [
    decode_case(*range(1, 700, 23), heads=(32, 8, 128)),
    decode_case(1000, 0, 3000, 17, 64, heads=(16, 8, 128), page_size=64),
    decode_case(1000, 0, 130, heads=(9, 3, 64), dtype="float16"),
    decode_case(900, 128, 129, heads=(8, 8, 256), page_size=128),
    decode_case(1500, 64, 700, heads=(64, 1, 128), page_size=32, cap=5.0),
    decode_case(2000, 100, 5, heads=(6, 2, 64), window=100),
    decode_case(2000, 100, 5, heads=(8, 4, 256), window=129, cap=3.0),
]
WITH_NAN = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")


@WITH_NAN
@pytest.mark.parametrize("case", INTERPRETED)
def test_interpreted_kernel_matches_the_reference(case):
    inputs = make_inputs(case)
    got = decode_attention(*inputs[:6], interpret=plgpu.InterpretGPUParams(), **case.options)
    assert_matches_reference(got, case, inputs)


CUT = DecodeTuningConfig(
    block_tokens=64, num_stages=1, num_workers=2, num_processors=3, min_split_tokens=64
)


@WITH_NAN
@pytest.mark.parametrize(
    ("case", "options"),
    [
        (decode_case(170, 0, 60, 330, heads=(2, 1, 64)), {}),
        (decode_case(170, 0, 60, heads=(2, 1, 64), window=120), {"split_tokens": 64}),
    ],
)
def test_interpreted_pieces_of_a_row_sum_to_the_same(case, options):
    inputs = make_inputs(case)
    plan = plan_decode(
        inputs.seq_lens,
        num_kv_heads=1,
        head_dim=64,
        dtype="bfloat16",
        max_tokens=inputs.page_table.shape[1] * 16,
        sliding_window=case.window,
        tuning=CUT,
        **options,
    )
    assert (np.asarray(plan.segments)[:, 5] > 1).any()
    interpret = plgpu.InterpretGPUParams()
    options = {**options, **case.options}
    got = decode_attention(*inputs[:6], interpret=interpret, tuning=CUT, plan=plan, **options)
    assert_matches_reference(got, case, inputs)


def test_interpreted_padding_that_is_left_changes_no_other_row():
    case = decode_case(170, 60, 330, 0, 0, 0, heads=(2, 1, 64))
    inputs, interpret = make_inputs(case), plgpu.InterpretGPUParams()
    got = [
        decode_attention(
            *inputs[:6], interpret=interpret, leaves_padding=leaves_padding, **case.options
        )
        for leaves_padding in (False, True)
    ]
    assert (got[0][:3] == got[1][:3]).all()
    assert not got[0][3:].any()


def make_plan(seq_lens, num_kv_heads):
    return plan_decode(
        seq_lens, num_kv_heads=num_kv_heads, head_dim=128, dtype="bfloat16", max_tokens=4096
    )


def _lower(heads, page_size, num_rows=8, **options):
    num_heads, num_kv_heads, head_dim = heads
    q = jnp.zeros((num_rows, num_heads, head_dim), jnp.bfloat16)
    pages = jnp.zeros((1, 4, page_size, num_kv_heads, head_dim), jnp.bfloat16)
    table = jnp.zeros((num_rows, 4096 // page_size), jnp.int32)
    args = (q, pages, pages, jnp.zeros(1, jnp.int32), table, jnp.ones(num_rows, jnp.int32))
    run = jax.jit(lambda *args: decode_attention(*args, scale=0.1, **options))
    return run.trace(*args).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(("heads", "page_size", "options"), LOWERED)
def test_kernel_lowers_for_cuda(heads, page_size, options):
    assert "mosaic_gpu" in _lower(heads, page_size, **options).as_text()


@pytest.mark.parametrize(
    "changes",
    [
        {"block_tokens": 128, "num_stages": 1},
        {"num_workers": 4, "num_stages": 1},
        {"programs_per_processor": 2, "num_workers": 2},
        {"num_workers": 1},
    ],
)
def test_tuning_configs_lower(changes):
    tuning = dataclasses.replace(decode_tuning(None, 128, "bfloat16"), **changes)
    assert "mosaic_gpu" in _lower((32, 8, 128), 16, tuning=tuning).as_text()


def test_it_is_one_launch_and_xla_adds_nothing_after_it():
    plan = make_plan(jnp.ones(8, jnp.int32), num_kv_heads=8)
    text = _lower((16, 8, 128), 16, plan=plan).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    after = text[text.index("custom_call @mosaic_gpu") :].splitlines()[1:]
    assert not [line for line in after if "stablehlo." in line]


@pytest.mark.parametrize(
    ("made_for", "options"),
    [
        ({"num_kv_heads": 4}, {}),
        ({"num_kv_heads": 8}, {"sliding_window": 100}),
        ({"num_kv_heads": 8}, {"leaves_padding": True}),
    ],
)
def test_a_plan_for_something_else_is_refused(made_for, options):
    plan = make_plan(jnp.ones(8, jnp.int32), **made_for)
    with pytest.raises(ValueError, match="plan must be made for this call's rows"):
        _lower((16, 8, 128), 16, plan=plan, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 8}, "page size must be one of .*; got 8"),
        ({"heads": (4, 2, 80)}, "stored head dim must be one of .*; got 80"),
        ({"heads": (65, 1, 64)}, "query heads a KV head must be at most 64; got 65"),
        ({"dtype": "float32"}, "bfloat16 or both float16; got float32"),
    ],
)
def test_what_the_kernel_cannot_read_is_refused(change, message):
    case = decode_case(20, **change)
    with pytest.raises(ValueError, match=message):
        decode_attention(*make_inputs(case)[:6], **case.options)


def test_split_tokens_of_no_whole_block_are_refused():
    with pytest.raises(ValueError, match="positive multiple of 64; got 96"):
        _lower((4, 2, 128), 16, split_tokens=96)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU)
@pytest.mark.parametrize("split_tokens", [None, 128])
def test_kernel_on_a_gpu_matches_the_reference(case, split_tokens):
    inputs = make_inputs(case)
    got = decode_attention(*inputs[:6], split_tokens=split_tokens, **case.options)
    assert_matches_reference(got, case, inputs)


@pytest.mark.gpu
def test_split_tokens_make_a_row_independent_of_the_batch():
    case = decode_case(700, 40, 1000, heads=(32, 8, 128))
    inputs = make_inputs(case)
    options = {"split_tokens": 256, **case.options}
    together = decode_attention(*inputs[:6], **options)
    alone = decode_attention(
        inputs.q[:1], *inputs[1:4], inputs.page_table[:1], inputs.seq_lens[:1], **options
    )
    np.testing.assert_array_equal(np.asarray(together[:1]), np.asarray(alone))
