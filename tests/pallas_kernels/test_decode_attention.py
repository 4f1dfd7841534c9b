"""The Mosaic GPU decode kernel: interpreted, lowered for CUDA, and (mark gpu) run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.tuning import DecodeTuningConfig
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


SHORT_SPLITS = DecodeTuningConfig(block_tokens=64, num_stages=2, min_split_tokens=64)


@WITH_NAN
@pytest.mark.parametrize("cut", [{"split_tokens": 64}, {"tuning": SHORT_SPLITS}])
def test_interpreted_splits_sum_to_the_same(cut):
    case = decode_case(170, 0, 60, heads=(2, 1, 64), window=120)
    inputs = make_inputs(case)
    got = decode_attention(*inputs[:6], interpret=plgpu.InterpretGPUParams(), **cut, **case.options)
    assert_matches_reference(got, case, inputs)


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


def test_few_rows_are_split_until_the_gpu_is_full():
    # 8 rows of 8 KV heads leave room for two splits on 132 processors; 64 rows fill them.
    assert "tensor<8x2x32x128xf32>" in _lower((32, 8, 128), 16, num_rows=8).as_text()
    assert "x32x128xf32>" not in _lower((32, 8, 128), 16, num_rows=64).as_text()


def test_a_tuning_config_with_heads_together_lowers():
    tuning = DecodeTuningConfig(block_tokens=128, num_stages=2, heads_together=True)
    assert "mosaic_gpu" in _lower((32, 8, 128), 16, tuning=tuning).as_text()


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
