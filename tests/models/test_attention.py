"""One decode row writes and attends in one kernel, where the kernel takes it."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from models import few_rows
from models.kernels import ModelKernels, model_kernels, write_rotated
from models.kv_cache import allocate_cache, cache_geometries
from models.registry import model_class
from models.weight_layout import WeightLayout
from pallas_kernels.attention import one_row_attention
from tests.models.test_decoder import GEMMA2, PAGES_A_ROW, Ragged, random_leaves
from tests.models.tiny_models import one_device, tiny_config

PAGE_SIZE = 16
SIZES = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 64, "num_hidden_layers": 2}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
SMALL_CAP = {"attn_logit_softcapping": 1.0}  # hidden states without cap or window: 7e-2 away


class CalledError(Exception):
    """The decode kernel was called."""


def call(*_: Any, **__: Any) -> None:
    raise CalledError


def trace(num_rows: int, *, is_decode_only: bool = True, **fields: Any) -> str:
    """A step of rows with one token each, lowered for CUDA; `decode` may not be called."""
    sizes = {"hidden_size": 256, "intermediate_size": 128, "head_dim": 64, **fields}
    config = tiny_config(**sizes, num_hidden_layers=2)
    kernels = replace(model_kernels("mosaic", "gpu"), decode=call, mixed_decode=call)
    layout = WeightLayout.of_model(
        model_class(config.architecture), config, stack="all", dtype="bfloat16", kernels=kernels
    )
    batch = Ragged(((4, 1),) * num_rows, num_decode_rows=num_rows).batch(1)
    batch = replace(batch, is_decode_only=is_decode_only)
    geometries = cache_geometries(config, page_size=PAGE_SIZE, dtype="bfloat16")
    cache = allocate_cache(geometries, (1 + PAGES_A_ROW * num_rows,), one_device())
    forward = jax.jit(lambda leaves, batch, cache: layout.merge(leaves)(batch, cache))
    traced = forward.trace(layout.abstract(one_device()), batch, cache)
    assert traced.out_info[0].dtype == jnp.bfloat16
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_one_row_needs_no_kernel_for_attention_alone() -> None:
    assert "mosaic_gpu" in trace(1)


@pytest.mark.parametrize(
    ("num_rows", "options"), [(2, {}), (1, {"is_decode_only": False}), (1, {"head_dim": 24})]
)
def test_other_steps_and_heads_have_kernels_for_each(num_rows: int, options: Any) -> None:
    with pytest.raises(CalledError):
        trace(num_rows, **options)


def step(kernels: ModelKernels, family: dict[str, Any]) -> list[np.ndarray]:
    """Hidden states and pages after one row's step."""
    config = tiny_config(**family, **SIZES)
    layout = WeightLayout.of_model(
        model_class(config.architecture), config, stack="all", dtype="bfloat16", kernels=kernels
    )
    leaves = [
        leaf.astype(want.dtype)
        for leaf, want in zip(random_leaves(layout), layout.abstract(one_device()), strict=True)
    ]
    geometries = cache_geometries(config, page_size=PAGE_SIZE, dtype="bfloat16")
    batch = replace(
        Ragged(((20, 1),), num_decode_rows=1).batch(len(geometries)),
        is_decode_only=True,
    )
    cache = allocate_cache(geometries, (1 + PAGES_A_ROW,) * len(geometries), one_device())
    rng = np.random.default_rng(3)
    cache = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), cache)
    hidden, cache = layout.merge(leaves)(batch, cache)
    return [np.asarray(x, np.float32) for x in (hidden, *jax.tree.leaves(cache))]


@pytest.mark.parametrize("family", [{}, GEMMA2 | WINDOWS | SMALL_CAP], ids=["Llama", "Gemma2"])
def test_one_row_is_the_same_step(family: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    by_xla = model_kernels("xla", "cpu")
    want = step(by_xla, family)
    interpreted = functools.partial(
        one_row_attention.rotary_decode, interpret=plgpu.InterpretGPUParams()
    )
    monkeypatch.setattr(one_row_attention, "rotary_decode", interpreted)
    for product in ("fits_norm", "fits_gate"):
        monkeypatch.setattr(few_rows, product, lambda *_: False)
    got = step(
        replace(by_xla, rotary_write=write_rotated, decode=call, fuses_few_rows=True), family
    )
    for x, y in zip(got, want, strict=True):
        assert np.linalg.norm(x - y) < 1e-2 * np.linalg.norm(y)
