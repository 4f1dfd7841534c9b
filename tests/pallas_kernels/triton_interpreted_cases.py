"""The Triton kernels on the CPU, by Triton's interpreter; a process of its own runs this.

The interpreter is chosen by the environment when triton is imported: TRITON_INTERPRET=1. It
multiplies no bfloat16, so all cases are float16.
"""

import sys

import jax
import jax.numpy as jnp

from pallas_kernels.fused import xla_fused
from pallas_kernels.fused.kv_write import write_by_loop
from pallas_kernels.triton_gpu.triton_decode import TritonDecodeTuning, decode_attention
from pallas_kernels.triton_gpu.triton_prefill import TritonPrefillTuning, prefill_attention
from pallas_kernels.triton_gpu.triton_rotary_write import rotary_write
from tests.pallas_kernels import triton_interpreter
from tests.pallas_kernels.paged_cases import (
    PagedCase,
    assert_matches_reference,
    decode_case,
    make_inputs,
)
from tests.pallas_kernels.test_rotary_write import assert_close
from tests.pallas_kernels.test_rotary_write import make_inputs as rotary_inputs

CUT = {
    "tuning": TritonDecodeTuning(block_tokens=32, num_stages=1, min_split_tokens=32, num_programs=9)
}
SPLIT = CUT | {"split_tokens": 32}
DECODE = [
    (decode_case(100, 0, heads=(4, 2, 128)), {}),
    (decode_case(300, 0, 1, heads=(3, 1, 64), window=70, cap=5.0, page_size=32), {}),
    (decode_case(200, heads=(2, 2, 256), page_size=128), {}),
    (decode_case(170, 0, 60, 330, heads=(2, 1, 64)), CUT),
    (decode_case(500, 0, 60, heads=(2, 1, 64), window=100, is_freed=True), CUT),
    (decode_case(170, 0, 60, heads=(2, 1, 64), window=120), SPLIT),
    (decode_case(1000, heads=(2, 1, 64), page_size=64), SPLIT),
]

SMALL = {"tuning": TritonPrefillTuning(tile_tokens=32, block_tokens=32, num_stages=1, num_warps=4)}
# case, number of decoded rows given or None, options
PREFILL = [
    (PagedCase((1, 70, 29), (40, 140, 29), heads=(2, 1, 128), padding=6, first_row=1), None, {}),
    (PagedCase((70, 9), (70, 139), heads=(2, 2, 256), page_size=128), None, {}),
    (
        PagedCase((70, 0, 3), (270, 0, 3), heads=(3, 1, 64), page_size=64, window=40, cap=5.0),
        None,
        SMALL,
    ),
    (PagedCase((1, 66, 1), (4, 96, 5), padding=3, heads=(4, 2, 64), first_row=1), 3, SMALL),
    (
        PagedCase((1, 40, 33), (4, 170, 133), padding=40, heads=(4, 2, 64), window=100,
                  is_freed=True),
        None,
        SMALL,
    ),
]  # fmt: skip


# make_inputs' arguments and fields
ROTARY = [
    ((8, (2, 1), (32, 32, 64)), {}),
    ((1, (1, 2), (64, 32, 64)), {"parts": 2, "bias": True, "norm": True}),
    ((5, (3, 2), (48, 32, 64)), {"norm": True}),
    ((3, (1, 2), (12, 8, 16)), {"bias": True}),
]


def check_rotary_write(case: tuple, fields: dict) -> None:
    """Compare with the jnp version."""
    args, options = rotary_inputs(*case, **fields, dtype="float16")
    with jax.disable_jit():
        got = rotary_write(*args, **options)
    assert_close(got, xla_fused.rotary_write(*args, write=write_by_loop, **options))


def check_decode(case: PagedCase, options: dict) -> None:
    """Compare with the reference."""
    inputs = make_inputs(case)
    with jax.disable_jit():
        got = decode_attention(*inputs[:6], **options, **case.options)
    assert_matches_reference(got, case, inputs)


def check_prefill(case: PagedCase, num_decoded: int | None, options: dict) -> None:
    """Compare with the reference; decoded rows pass through."""
    inputs, decoded = make_inputs(case), None
    if num_decoded is not None:
        decoded = jnp.full((num_decoded, *inputs.q.shape[1:]), 7, inputs.q.dtype)
    first_row = jnp.array([case.first_row])
    with jax.disable_jit():
        got = prefill_attention(*inputs, first_row, decoded, **options, **case.options)
    if decoded is not None:
        before = inputs.query_start_loc[case.first_row]
        assert (got[:before] == 7).all()
        got = got.at[:before].set(0)
    assert_matches_reference(got, case, inputs)


def check_rows_do_not_depend_on_the_batch() -> None:
    """With `split_tokens`, a row alone gives the same bits as in a batch."""
    case = decode_case(170, 100, 60, heads=(2, 1, 64), dtype="float16")
    inputs = make_inputs(case)
    with jax.disable_jit():
        whole = decode_attention(*inputs[:6], **SPLIT, **case.options)
        last = (inputs.q[2:], *inputs[1:4], inputs.page_table[2:], inputs.seq_lens[2:])
        assert (decode_attention(*last, **SPLIT, **case.options) == whole[2:]).all()


def main() -> int:
    """Run all cases."""
    triton_interpreter.install()
    for case, options in DECODE:
        check_decode(case._replace(dtype="float16"), options)
    for case, num_decoded, options in PREFILL:
        check_prefill(case._replace(dtype="float16"), num_decoded, options)
    check_rows_do_not_depend_on_the_batch()
    for case, fields in ROTARY:
        check_rotary_write(case, fields)
    print(f"{len(DECODE) + len(PREFILL) + len(ROTARY)} cases match the reference")
    return 0


if __name__ == "__main__":
    sys.exit(main())
