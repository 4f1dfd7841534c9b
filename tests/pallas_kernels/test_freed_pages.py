"""Pages before the window may be anybody's: the kernels neither read nor mix in what they hold."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import decode_attention, prefill_attention, xla_attention
from pallas_kernels.attention.tuning import prefill_tuning
from tests.pallas_kernels.paged_cases import (
    PagedCase,
    assert_matches_reference,
    decode_case,
    make_inputs,
)

INTERPRETED = {"interpret": plgpu.InterpretGPUParams()}
WITH_NAN = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
# Windows that end at the border of a page, one key before it, and within one.
DECODE = [
    decode_case(300, 65, 9, heads=(2, 1, 64), window=44, is_freed=True),
    decode_case(160, 161, heads=(2, 1, 64), window=33, cap=5.0, is_freed=True),
    decode_case(300, heads=(2, 1, 64), window=70, page_size=64, is_freed=True),
]
PREFILL = [
    PagedCase((70, 0, 3), (270, 0, 90), heads=(2, 1, 64), window=40, is_freed=True),
    PagedCase((1, 17), (200, 177), heads=(2, 1, 64), window=16, cap=3.0, is_freed=True),
    PagedCase((20,), (300,), heads=(2, 1, 64), page_size=64, window=70, is_freed=True),
]


def freed_inputs(case: PagedCase):
    """Inputs in which at least one page of NaN stands in a page table, before a window."""
    inputs = make_inputs(case)
    length = max(case.seq_lens)
    row = case.seq_lens.index(length)
    first_page = inputs.k_pages[1, inputs.page_table[row, 0]]
    assert np.isnan(np.asarray(first_page, np.float32)).all()
    return inputs


@pytest.mark.parametrize("case", DECODE)
def test_xla_decode_never_mixes_in_a_page_before_the_window(case):
    inputs = freed_inputs(case)
    got = xla_attention.decode_attention(*inputs[:6], **case.options)
    assert_matches_reference(got, case, inputs)


@pytest.mark.parametrize("case", PREFILL)
def test_xla_prefill_never_mixes_in_a_page_before_the_window(case):
    inputs = freed_inputs(case)
    got = xla_attention.prefill_attention(*inputs, jnp.array([0]), **case.options)
    assert_matches_reference(got, case, inputs)


@WITH_NAN
@pytest.mark.parametrize("case", DECODE[1:2])  # interpreted, each takes seconds
def test_mosaic_decode_never_mixes_in_a_page_before_the_window(case):
    inputs = freed_inputs(case)
    got = decode_attention.decode_attention(*inputs[:6], **INTERPRETED, **case.options)
    assert_matches_reference(got, case, inputs)


@WITH_NAN
@pytest.mark.parametrize("case", PREFILL[1:2])
def test_mosaic_prefill_never_mixes_in_a_page_before_the_window(case):
    inputs = freed_inputs(case)
    tuning = dataclasses.replace(prefill_tuning(None, case.heads[2], case.dtype), num_programs=2)
    got = prefill_attention.prefill_attention(
        *inputs, jnp.array([0]), tuning=tuning, **INTERPRETED, **case.options
    )
    assert_matches_reference(got, case, inputs)
