"""Rotary embedding, write and attention in one kernel: interpreted, lowered, and (gpu) run."""

import functools
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.decode_attention import decode_attention
from pallas_kernels.attention.one_row_attention import (
    OneRowTuning,
    choose_one_row_tuning,
    fits_rotary_decode,
    rotary_decode,
)
from pallas_kernels.attention.reference import paged_attention
from pallas_kernels.fused import xla_fused
from pallas_kernels.fused.kv_write import write_by_loop
from pallas_kernels.fused.rotary_write import rotary_write

GARBAGE_ID = 2**30
SMALL = OneRowTuning(tile_tokens=16, cluster_blocks=2, clusters=2, lone_rounds=2)
ONE_BLOCK = OneRowTuning(tile_tokens=16, cluster_blocks=1, clusters=1, lone_rounds=1)
TWO_PAGES = OneRowTuning(tile_tokens=32, cluster_blocks=1, clusters=1, lone_rounds=1)
TOLERANCE = {"float16": 2e-3, "bfloat16": 1e-2}


@dataclass(frozen=True)
class Case:
    """Rows of `lens` tokens, the new one included; sizes = (head, rotary, stored head dim)."""

    lens: tuple[int, ...]
    heads: tuple[int, int] = (2, 2)  # K, G
    sizes: tuple[int, int, int] = (64, 64, 64)
    page_size: int = 16
    parts: int = 2
    norm: bool = False
    bias: bool = False
    dtype: str = "bfloat16"
    window: int | None = None
    cap: float | None = None

    @property
    def mask_options(self) -> dict[str, Any]:
        return {"scale": 0.3, "sliding_window": self.window, "soft_cap": self.cap}


def make_inputs(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arrays, and options. Slots and ids that no row owns or sees hold garbage."""
    rng = np.random.default_rng(0)
    (K, G), (H, rotary_dim, stored), B = case.heads, case.sizes, case.page_size
    width, rows = K * (G + 2) * H, len(case.lens)
    used = [-(-length // B) for length in case.lens]
    num_pages = 1 + sum(used)
    pages = np.full((2, 2, num_pages, B, K, stored), np.nan, np.float32)
    table = np.full((rows, max(used) + 1), GARBAGE_ID, np.int32)
    slots = np.arange(rows) % B  # of the null page
    free = iter(1 + rng.permutation(num_pages - 1))
    for row, length in enumerate(case.lens):
        unseen = 0 if case.window is None else max(0, length - case.window) // B
        for index in range(used[row]):
            page = next(free)
            if index < unseen:
                continue
            table[row, index] = page
            kept = min(length - 1 - index * B, B)
            pages[:, 1, page, :kept] = rng.standard_normal((2, kept, K, stored))
        if length:
            slots[row] = table[row, (length - 1) // B] * B + (length - 1) % B
    shape = (case.parts, rows, width) if case.parts else (rows, width)
    qkv = jnp.asarray(rng.standard_normal(shape), "float32" if case.parts else case.dtype)
    angles = rng.standard_normal((rows, rotary_dim // 2))
    options: dict[str, Any] = {"num_kv_heads": K, "head_dim": H, "eps": 1e-6}
    if case.bias:
        options["bias"] = jnp.asarray(rng.standard_normal((3, width)), case.dtype)
    if case.norm:
        for name in ("q_gains", "k_gains"):
            options[name] = jnp.asarray(rng.standard_normal((3, H)), case.dtype)
        options["gain_offset"] = 1.0
    arrays = (
        qkv,
        *(jnp.asarray(kind, case.dtype) for kind in pages),
        jnp.array([2], jnp.int32),
        jnp.array([1], jnp.int32),
        jnp.asarray(slots, jnp.int32),
        *(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin)),
        jnp.asarray(table),
        jnp.asarray(case.lens, jnp.int32),
    )
    return arrays, options


def assert_matches(got, case: Case, arrays, written) -> None:
    """Compare with the reference on `written` = (queries, k_pages, v_pages) of `rotary_write`."""
    *_, cache_layer, _, _, _, table, lens = arrays
    q, k_pages, v_pages = written
    for pages, want in zip(got[1:], (k_pages, v_pages), strict=True):
        np.testing.assert_array_equal(np.asarray(pages, np.float32), np.asarray(want, np.float32))
    starts = jnp.arange(len(case.lens) + 1, dtype=jnp.int32)
    want = paged_attention(
        q.astype(jnp.float32), k_pages, v_pages, cache_layer, table, lens, starts,
        **case.mask_options,
    )  # fmt: skip
    result, want = (np.asarray(x, np.float32) for x in (got[0], want))
    is_real = np.asarray(case.lens) > 0
    assert got[0].dtype == k_pages.dtype
    assert not result[~is_real].any()
    error = np.linalg.norm(result - want, axis=(1, 2))[is_real]
    assert (error < TOLERANCE[case.dtype] * np.linalg.norm(want, axis=(1, 2))[is_real]).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize(
    ("case", "tuning"),
    [
        (Case((1, 0, 75)), SMALL),
        (Case((50,), heads=(1, 3), sizes=(96, 64, 128), norm=True, cap=4.0, page_size=32), SMALL),
        (Case((90,), window=60, bias=True, parts=0, dtype="float16"), ONE_BLOCK),
        # The window begins in the second page of a tile, and the first is not this row's.
        (Case((90,), window=40), TWO_PAGES),
        (Case((33, 32), heads=(1, 1), sizes=(256, 256, 256), page_size=64, window=17), None),
    ],
)
def test_interpreted_kernel_matches_the_reference(case, tuning):
    arrays, options = make_inputs(case)
    interpret = plgpu.InterpretGPUParams()
    got = rotary_decode(*arrays, **options, **case.mask_options, interpret=interpret, tuning=tuning)
    write = functools.partial(xla_fused.rotary_write, write=write_by_loop)
    assert_matches(got, case, arrays, write(*arrays[:8], **options))


def lower_for_cuda(case: Case, num_pages: int, max_pages: int, tuning=None) -> str:
    """Lowered, with 28 layers and a table of its own size."""
    arrays, options = jax.eval_shape(lambda: make_inputs(case))
    num_kv_heads, head_dim = case.heads[0], case.sizes[0]
    options = {name: x for name, x in options.items() if name in ("bias", "q_gains", "k_gains")}
    pages = jax.ShapeDtypeStruct(
        (28, num_pages, case.page_size, num_kv_heads, case.sizes[2]), arrays[1].dtype
    )
    table = jax.ShapeDtypeStruct((len(case.lens), max_pages), jnp.int32)
    arrays = (arrays[0], pages, pages, *arrays[3:8], table, arrays[9])
    run = functools.partial(
        rotary_decode, num_kv_heads=num_kv_heads, head_dim=head_dim, tuning=tuning,
        **case.mask_options,
    )  # fmt: skip
    traced = jax.jit(run, donate_argnums=(1, 2)).trace(*arrays, **options)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


QWEN = Case((1,), heads=(8, 2), sizes=(128, 128, 128), norm=True, parts=6)
LLAMA = Case((1,), heads=(8, 4), sizes=(128, 128, 128), parts=4)


@pytest.mark.parametrize(
    ("case", "tuning"),
    [
        (QWEN, None),
        (LLAMA, None),
        (LLAMA, OneRowTuning(tile_tokens=32, cluster_blocks=1, clusters=16, lone_rounds=2)),
        (
            QWEN,
            OneRowTuning(tile_tokens=64, cluster_blocks=4, clusters=2, lone_rounds=1),
        ),
        (Case((1,) * 4, heads=(2, 7), bias=True, page_size=128), None),
        (Case((1,), heads=(4, 2), sizes=(256, 256, 256), window=512, cap=50.0), None),
        (Case((1,), heads=(32, 1), sizes=(80, 80, 128), page_size=32, dtype="float16"), None),
    ],
)
def test_it_lowers_for_cuda_and_updates_the_pages_in_place(case, tuning):
    text = lower_for_cuda(case, num_pages=2000, max_pages=256, tuning=tuning)
    [kernel] = [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]
    arguments = re.search(r"@mosaic_gpu\w*\(([^)]*)\)", kernel)
    assert arguments is not None
    operands = arguments[1].count("%")
    # Keys and values: outputs 3 and 4 of the kernel are its last two operands.
    for output, operand in ((3, operands - 2), (4, operands - 1)):
        assert f"output_tuple_indices = [{output}], operand_index = {operand}" in kernel
    assert text.count("tf.aliasing_output") + text.count("jax.buffer_donor") == 2


def test_a_longer_table_brings_clusters_until_the_gpu_is_full():
    contexts = (512, 513, 1024, 2048, 2**17)
    tunings = [choose_one_row_tuning(1, 8, tokens) for tokens in contexts]
    assert [tuning.clusters for tuning in tunings] == [1, 2, 2, 4, 4]
    assert choose_one_row_tuning(4, 32, 2**17).clusters == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": (1, 9)}, "takes no 9 query heads"),
        ({"heads": (1, 5), "sizes": (256, 256, 256)}, "takes no 5 query heads"),
        ({"page_size": 8}, "in pages of 8"),
        ({"sizes": (32, 32, 32)}, "stored as 32"),
        ({"sizes": (64, 20, 64)}, "rotary dim 20"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    case = Case((20,), **change)
    arrays, options = make_inputs(case)
    (_, group), sizes = case.heads, case.sizes
    assert not fits_rotary_decode(group, *sizes, case.page_size, case.dtype)
    with pytest.raises(ValueError, match=message):
        rotary_decode(*arrays, **options, **case.mask_options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile_tokens": 48}, "tile_tokens must be one of"),
        ({"cluster_blocks": 16}, "cluster_blocks must be 1 to 8; got 16"),
        ({"clusters": 0}, "must be at least 1; got 0 and 1"),
    ],
)
def test_tuning_out_of_bounds_is_refused(change, message):
    fields = {"tile_tokens": 16, "cluster_blocks": 2, "clusters": 2, "lone_rounds": 1}
    with pytest.raises(ValueError, match=message):
        OneRowTuning(**{**fields, **change})


@pytest.mark.parametrize(("group", "size"), [(8, 64), (8, 128), (4, 256)])
def test_as_many_numbers_of_query_heads_fit_as_there_are_registers(group, size):
    assert fits_rotary_decode(group, size, size, size, 16, jnp.bfloat16)


def test_a_table_of_other_rows_is_refused():
    arrays, options = make_inputs(Case((20, 30)))
    with pytest.raises(ValueError, match=r"page_table must be \[2, any\]"):
        rotary_decode(*arrays[:8], arrays[8][:1], arrays[9], **options, scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [QWEN, LLAMA, Case((1,), heads=(2, 7), bias=True)])
@pytest.mark.parametrize("lens", [(1,), (384,), (3000, 0, 17)])
def test_kernel_on_a_gpu_writes_as_rotary_write_and_matches_the_reference(case, lens):
    case = Case(**{**vars(case), "lens": lens})
    arrays, options = make_inputs(case)
    got = rotary_decode(*arrays, **options, **case.mask_options)
    written = rotary_write(*arrays[:8], **options)
    assert_matches(got, case, arrays, written)
    attended = decode_attention(*written, arrays[4], *arrays[8:], **case.mask_options)
    np.testing.assert_allclose(
        np.asarray(got[0], np.float32), np.asarray(attended, np.float32), atol=2e-2
    )
