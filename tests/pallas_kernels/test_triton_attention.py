"""The Triton attention kernels: interpreted, compiled for each capability, and (mark gpu) run."""

import importlib
import inspect
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.triton_gpu.triton_decode import decode_attention
from pallas_kernels.triton_gpu.triton_prefill import prefill_attention
from tests.conftest import REPOSITORY
from tests.pallas_kernels.paged_cases import (
    PagedCase,
    assert_matches_reference,
    decode_case,
    make_inputs,
)
from tests.pallas_kernels.test_decode_attention import ON_GPU as DECODE_ON_GPU
from tests.pallas_kernels.test_prefill_attention import ON_GPU as PREFILL_ON_GPU

# Shared memory that a program may have, bytes.
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
# (N, K, H), options
COMPILED = [
    ((32, 8, 128), {}),
    ((16, 8, 64), {"sliding_window": 512, "soft_cap": 30.0}),
    ((8, 1, 256), {"split_tokens": 256}),
    ((64, 1, 128), {}),
    ((8, 4, 256), {"sliding_window": 300, "soft_cap": 50.0}),
]


def zeros(heads, num_rows=4, num_tokens=200, dtype="bfloat16"):
    """Arrays of one call of prefill: q, pages, layer, table, lengths, offsets, first row."""
    num_heads, num_kv_heads, head_dim = heads
    q = jnp.zeros((num_tokens, num_heads, head_dim), dtype)
    pages = jnp.zeros((1, 4, 16, num_kv_heads, head_dim), dtype)
    table = jnp.zeros((num_rows, 256), jnp.int32)
    ints = [jnp.zeros(n, jnp.int32) for n in (num_rows, num_rows + 1, 1)]
    return q, pages, pages, jnp.zeros(1, jnp.int32), table, *ints


def call_both(heads, num_rows=4, **options) -> None:
    arrays = zeros(heads, num_rows)
    decode_attention(arrays[0][:num_rows], *arrays[1:6], scale=0.1, **options)
    options.pop("split_tokens", None)
    prefill_attention(*arrays, scale=0.1, **options)


def test_interpreted_kernels_match_the_reference():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.pallas_kernels.triton_interpreted_cases"],
        env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "cases match the reference" in ran.stdout


@pytest.fixture
def calls(monkeypatch):
    """What the callers hand to jax_triton: kernel, types of its pointers, constants, options."""
    names = {"bfloat16": "*bf16", "float32": "*fp32", "int32": "*i32"}
    seen = []

    def triton_call(*args, kernel, out_shape, grid, num_warps=4, num_stages=3, **constants):
        outputs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out_shape)
        arrays = [*args, *jax.tree.leaves(outputs)]
        types = ["i32" if isinstance(x, int) else names[x.dtype.name] for x in arrays]
        options = dict(num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True)
        seen.append((kernel, types, constants, options))
        return outputs

    pytest.importorskip("triton")
    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(triton_call=triton_call))
    return seen


def compile_kernel(capability, kernel, types, constants, options):
    """The compiled kernel, down to machine code; no GPU is needed."""
    compiler = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    signature = dict(zip(kernel.arg_names, types, strict=False))
    pointers = [i for i, kind in enumerate(types) if kind.startswith("*")]
    source = compiler.ASTSource(
        kernel,
        signature | {name: "constexpr" for name in constants},
        constants,
        {(index,): [["tt.divisibility", 16]] for index in pointers},
    )
    return importlib.import_module("triton").compile(source, target=target, options=options)


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_kernels_compile_for_each_capability(capability, calls, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with jax.disable_jit():
        for heads, options in COMPILED if capability == 86 else COMPILED[:1]:
            call_both(heads, **options)
        call_both((32, 8, 128), num_rows=200)  # one piece a row
    kernels = set()
    for call in calls:
        compiled = compile_kernel(capability, *call)
        kernels.add(compiled.metadata.name)
        assert compiled.metadata.shared <= SHARED_BYTES[capability]
        if "combine" not in compiled.metadata.name:
            assert "cp.async" in compiled.asm["ptx"]
            assert "mma" in compiled.asm["ptx"]
    assert kernels == {"decode_kernel", "decode_piece_kernel", "combine_kernel", "prefill_kernel"}


@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "num_kernels"), [(8, 200, 3), (200, 200, 2), (1, 1, 3)]
)
def test_jax_triton_lowers_the_calls(monkeypatch, num_rows, num_tokens, num_kernels):
    package = pytest.importorskip("jax_triton", exc_type=ImportError)
    library = package.triton_lib.triton_kernel_call_lib
    monkeypatch.setattr(library, "get_compute_capability", lambda device: 86)
    arrays = zeros((32, 8, 128), num_rows, num_tokens)

    def both(q, *others):
        decoded = decode_attention(q[:num_rows], *others[:5], scale=0.1)
        return prefill_attention(q, *others, decoded, scale=0.1)

    run = jax.jit(both).trace(*arrays)
    text = run.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@triton_kernel_call") == num_kernels


def test_a_missing_package_is_told_with_its_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    wanted = "must have jax-triton and a triton that fits it; .*; install them: pip install"
    with pytest.raises(ValueError, match=wanted):
        call_both((4, 2, 64))


@pytest.mark.parametrize(
    ("heads", "dtype", "message"),
    [
        ((4, 2, 64), "float32", "bfloat16 or both float16; got float32"),
        ((4, 2, 96), "bfloat16", r"must be one of \(64, 128, 256\); got 96"),
        ((65, 1, 64), "bfloat16", "must be at most 64; got 65"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(heads, dtype, message):
    arrays = zeros(heads, dtype=dtype)
    with pytest.raises(ValueError, match=message):
        prefill_attention(*arrays, scale=0.1)
    with pytest.raises(ValueError, match=message):
        decode_attention(arrays[0][:4], *arrays[1:6], scale=0.1)


def test_options_that_do_not_fit_are_refused():
    arrays = zeros((4, 2, 64))
    with pytest.raises(ValueError, match="split_tokens must be a positive multiple of 64; got 100"):
        decode_attention(arrays[0][:4], *arrays[1:6], scale=0.1, split_tokens=100)
    with pytest.raises(ValueError, match=r"decoded must be \[D, 4, 64\] bfloat16; got .*float32"):
        prefill_attention(*arrays, jnp.zeros((2, 4, 64)), scale=0.1)


def test_the_signatures_are_those_of_the_xla_version():
    xla = importlib.import_module("pallas_kernels.attention.xla_attention")
    for ours, theirs in (
        (decode_attention, xla.decode_attention),
        (prefill_attention, xla.prefill_attention),
    ):
        wanted = dict(inspect.signature(theirs).parameters)
        got = dict(inspect.signature(ours).parameters)
        del got["tuning"]
        assert list(got.values()) == list(wanted.values())


MORE_DECODE_ON_GPU = [
    decode_case(5000, 0, 3, heads=(32, 8, 128)),
    *(decode_case(5000, 300, 0, heads=(8, 2, h), page_size=128) for h in (64, 128, 256)),
    decode_case(5000, 300, 0, heads=(16, 8, 128), window=1000, is_freed=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", DECODE_ON_GPU + MORE_DECODE_ON_GPU)
@pytest.mark.parametrize("split_tokens", [None, 256])
def test_decode_on_a_gpu_matches_the_reference(case, split_tokens):
    pytest.importorskip("jax_triton", exc_type=ImportError)
    inputs = make_inputs(case)
    got = decode_attention(*inputs[:6], split_tokens=split_tokens, **case.options)
    assert_matches_reference(got, case, inputs)


@pytest.mark.gpu
def test_split_tokens_on_a_gpu_gives_a_row_the_same_bits_in_any_batch():
    pytest.importorskip("jax_triton", exc_type=ImportError)
    case = decode_case(3000, 17, 1000, *[40] * 61, heads=(16, 8, 128))
    inputs = make_inputs(case)
    options = case.options | {"split_tokens": 256}
    whole = decode_attention(*inputs[:6], **options)
    few = decode_attention(
        inputs.q[:2], *inputs[1:4], inputs.page_table[:2], inputs.seq_lens[:2], **options
    )
    assert (few == whole[:2]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("case", PREFILL_ON_GPU)
def test_prefill_on_a_gpu_matches_the_reference(case: PagedCase):
    pytest.importorskip("jax_triton", exc_type=ImportError)
    inputs = make_inputs(case)
    before = inputs.query_start_loc[case.first_row]
    decoded = jnp.full((case.first_row + 1, *inputs.q.shape[1:]), 7, inputs.q.dtype)
    got = prefill_attention(*inputs, jnp.array([case.first_row]), decoded, **case.options)
    assert (got[:before] == 7).all()
    assert_matches_reference(got.at[:before].set(0), case, inputs)
