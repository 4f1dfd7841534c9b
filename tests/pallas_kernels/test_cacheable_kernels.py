"""The Mosaic kernels' bytes depend on their code alone, so the compilation cache finds them."""

import importlib
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic_gpu import lowering
from jax.experimental.mosaic.gpu import core
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import attention
from pallas_kernels.attention.decode_attention import decode_attention
from pallas_kernels.attention.prefill_attention import prefill_attention
from pallas_kernels.cacheable_kernels import make_kernels_cacheable

S, N, K, H = 8, 8, 2, 128


def lower_for_cuda(function: Any, *args: Any) -> str:
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def attention_programs(decode: Any = decode_attention, prefill: Any = prefill_attention):
    """The lowered decode and prefill programs, with JAX's trace caches as they are."""
    q = jnp.zeros((S, N, H), jnp.bfloat16)
    pages = jnp.zeros((1, 4, 16, K, H), jnp.bfloat16)
    one = jnp.zeros(1, jnp.int32)
    args = (q, pages, pages, one, jnp.zeros((S, 256), jnp.int32), jnp.ones(S, jnp.int32))
    window = {"scale": 0.1, "sliding_window": 300}
    return [
        lower_for_cuda(lambda *args: decode(*args, **window), *args),
        lower_for_cuda(lambda *args: prefill(*args, **window), *args, jnp.arange(S + 1), one),
    ]


def kernels_of(programs: list[str]) -> list[str]:
    """The serialised modules inside the programs."""
    kernels = [re.findall(r'mosaic_gpu_v2.*? module = "([^"]*)"', text) for text in programs]
    assert [len(found) for found in kernels] == [1, 1]
    assert all(len(found[0]) > 10_000 for found in kernels)
    return [found[0] for found in kernels]


@pytest.fixture
def moved(tmp_path, monkeypatch) -> tuple[Any, Any]:
    """The same two kernels from files with other names, in another folder, on other lines."""
    monkeypatch.syspath_prepend(tmp_path)
    names = r"(mosaic_attention|decode_\w+|prefill_\w+)"
    for path in Path(attention.__path__[0]).glob("*.py"):
        if re.fullmatch(names, path.stem):
            text = re.sub(rf"\bpallas_kernels\.attention\.{names}", r"moved_\1", path.read_text())
            (tmp_path / f"moved_{path.name}").write_text("\n" * 5 + text)
    decode = importlib.import_module("moved_decode_attention")
    prefill = importlib.import_module("moved_prefill_attention")
    return decode.decode_attention, prefill.prefill_attention


def lower_an_unrelated_kernel() -> None:
    """It takes the next dump number."""

    def double(x_ref, out_ref, scratch):
        scratch[...] = x_ref[...] + x_ref[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch, out_ref)
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        double,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=[plgpu.SMEM((128,), jnp.float32)],
    )
    assert "mosaic_gpu" in lower_for_cuda(kernel, jnp.zeros(128))


def programs_after_other_work(moved: tuple[Any, Any]) -> tuple[list[str], list[str]]:
    """Of the moved kernels, and then, with all that they traced in the caches, of our own."""
    jax.clear_caches()
    lower_an_unrelated_kernel()
    return attention_programs(*moved), attention_programs()


@pytest.fixture(scope="module")
def fresh() -> list[str]:
    jax.clear_caches()
    return attention_programs()


def test_kernels_do_not_depend_on_files_lines_and_what_was_traced_before(fresh, moved):
    of_moved, later = programs_after_other_work(moved)
    assert kernels_of(of_moved) == kernels_of(fresh)
    assert later == fresh


def test_without_the_wrapper_they_would(fresh, moved, monkeypatch):
    """Proves that the wrapper is in place, and that the test above can fail."""
    wrapped = core._run_serde_pass
    assert getattr(wrapped, "is_cacheable", False)
    monkeypatch.setattr(core, "_run_serde_pass", wrapped.__wrapped__)  # pyright: ignore[reportFunctionMemberAccess]
    of_moved, later = map(kernels_of, programs_after_other_work(moved))
    for ours, theirs, last in zip(kernels_of(fresh), of_moved, later, strict=True):
        assert len({ours, theirs, last}) == 3
        assert "attention.py" not in ours
        assert "moved_" in theirs


def test_wrapping_twice_changes_nothing():
    wrapped = core._run_serde_pass
    make_kernels_cacheable()
    assert core._run_serde_pass is wrapped


def test_programs_that_hold_the_same_kernel_lower_it_once(monkeypatch):
    jax.clear_caches()
    first = attention_programs()

    def refuse(*_, **__):
        raise AssertionError("lowered again")

    monkeypatch.setattr(lowering, "lower_jaxpr_to_module", refuse)
    assert kernels_of(attention_programs()) == kernels_of(first)
    jax.clear_caches()
    with pytest.raises(AssertionError, match="lowered again"):
        attention_programs()
