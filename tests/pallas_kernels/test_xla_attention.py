"""The XLA version of paged attention against the reference, and its memory."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import xla_attention
from pallas_kernels.attention.xla_attention import decode_attention, prefill_attention
from tests.pallas_kernels.paged_cases import (
    PagedCase,
    assert_matches_reference,
    decode_case,
    make_inputs,
)

DECODE = [
    decode_case(1),
    decode_case(100, 0, 300, dtype="float32", heads=(9, 3, 64)),
    decode_case(128, 129, 127, page_size=64, heads=(8, 8, 128)),
    decode_case(200, 0, 0, page_size=128, heads=(4, 1, 256), dtype="float16"),
    decode_case(500, 3, window=40, page_size=32, dtype="float32"),
    decode_case(260, 130, cap=3.0, dtype="float32", heads=(6, 2, 80)),
    decode_case(400, 399, 17, window=129, cap=5.0, page_size=64),
]
PREFILL = [
    PagedCase((5,), (5,)),
    PagedCase((70, 0, 1, 30), (70, 0, 150, 300), padding=7, dtype="float32", heads=(9, 3, 64)),
    PagedCase((1, 1, 64), (40, 90, 64), first_row=2, dtype="float32"),
    PagedCase((130,), (400,), page_size=64, window=50, heads=(4, 4, 128)),
    PagedCase((65, 3), (65, 259), page_size=128, cap=4.0, heads=(4, 1, 256), dtype="float16"),
    PagedCase((20, 90), (200, 90), window=16, cap=3.0, page_size=32, dtype="float32"),
]


@pytest.mark.parametrize("case", DECODE)
def test_decode_matches_the_reference(case):
    inputs = make_inputs(case)
    got = decode_attention(*inputs[:6], **case.options)
    assert_matches_reference(got, case, inputs)


@pytest.mark.parametrize("case", PREFILL)
def test_prefill_matches_the_reference(case):
    inputs = make_inputs(case)
    got = prefill_attention(*inputs, jnp.array([case.first_row]), **case.options)
    assert_matches_reference(got, case, inputs)


def test_the_forms_for_a_gpu_match_the_reference(monkeypatch):
    # All rows, or 16 tiles, in one step of the loop.
    monkeypatch.setattr(xla_attention, "_is_cpu", lambda: False)
    case = DECODE[1]
    inputs = make_inputs(case)
    got = jax.jit(lambda *x: inspect.unwrap(decode_attention)(*x, **case.options))(*inputs[:6])
    assert_matches_reference(got, case, inputs)
    case = PREFILL[1]
    inputs = make_inputs(case)
    prefill = jax.jit(lambda *x: inspect.unwrap(prefill_attention)(*x, **case.options))
    assert_matches_reference(prefill(*inputs, jnp.array([0])), case, inputs)


def test_decode_takes_a_block_of_split_tokens():
    case = decode_case(200, 70, dtype="float32")
    inputs = make_inputs(case)
    got = decode_attention(*inputs[:6], split_tokens=32, **case.options)
    assert_matches_reference(got, case, inputs)


def test_a_row_does_not_depend_on_who_shares_the_batch():
    case = decode_case(300, 40, 1000)
    inputs = make_inputs(case)
    together = decode_attention(*inputs[:6], **case.options)
    alone = decode_attention(
        inputs.q[:1], *inputs[1:4], inputs.page_table[:1], inputs.seq_lens[:1], **case.options
    )
    np.testing.assert_array_equal(np.asarray(together[:1]), np.asarray(alone))


def test_split_tokens_of_no_whole_page_are_refused():
    case = decode_case(20)
    with pytest.raises(ValueError, match="multiple of the page size 16; got 24"):
        decode_attention(*make_inputs(case)[:6], split_tokens=24, **case.options)


def _abstract(num_tokens: int, num_rows: int, num_pages: int):
    pages = jax.ShapeDtypeStruct((4, num_pages, 16, 8, 128), jnp.bfloat16)

    def ints(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    q = jax.ShapeDtypeStruct((num_tokens, 32, 128), jnp.bfloat16)
    return q, pages, pages, ints(1), ints(num_rows, 2048), ints(num_rows)


def _temporary_bytes(function, *args) -> int:
    return function.lower(*args, scale=0.1).compile().memory_analysis().temp_size_in_bytes


def test_temporaries_are_no_layer_of_the_cache_and_no_square_of_the_tokens():
    num_pages = 4096  # a layer of K: 128 MiB; the queries: 64 MiB
    ints = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (2, 1)]
    prefill = _temporary_bytes(prefill_attention, *_abstract(8192, 1, num_pages), *ints)
    decode = _temporary_bytes(decode_attention, *_abstract(64, 64, num_pages))
    assert prefill < 32 * 2**20
    assert decode < 32 * 2**20
