"""The batch-invariant kernels: one rounding in every form of a sum, and nothing left to XLA."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from models.invariant_kernels import (
    compute_invariant_logits,
    invariance_refusal,
    invariant_kernels,
)
from models.kv_cache import allocate_cache, cache_geometries
from models.layer_slice import LayerSlice
from models.layers import compute_logits
from models.registry import model_class
from models.weight_layout import WeightLayout
from pallas_kernels.fused.fused_inputs import total
from tests.models.test_decoder import PAGES_A_ROW, Ragged
from tests.models.tiny_models import one_device, tiny_config

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "head_dim": 64,
    "vocab_size": 128,
    "num_hidden_layers": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "all biases": {"attention_bias": True, "mlp_bias": True},
    "Gemma2 with windows": {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 8},
}
EPS = {"eps": 1e-5, "gain_offset": 0.0}


def random(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape), dtype)


def both_forms(*shape: int) -> tuple[jax.Array, jax.Array]:
    """Planes float32[3, ...], and their total as a product of many rows rounds it."""
    planes = random(3, *shape, dtype=jnp.float32)
    rounded = ((planes[0] + planes[1]) + planes[2]).astype(jnp.bfloat16)
    assert (rounded != planes.sum(0)).any()
    return planes, rounded


def assert_same_bits(got: Any, want: Any) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


def test_norms_and_gates_read_planes_and_whole_products_alike_and_row_by_row() -> None:
    kernels = invariant_kernels(plgpu.InterpretGPUParams())
    x, gains = random(5, 128), LayerSlice.of(random(128))
    planes, whole = both_forms(5, 128)
    summed = kernels.add_norm(x, planes, gains, **EPS)
    assert_same_bits(summed, kernels.add_norm(x, whole, gains, **EPS))
    alone = kernels.add_norm(x[3:4], planes[:, 3:4], gains, **EPS)
    assert_same_bits(alone, [part[3:4] for part in summed])
    planes, whole = both_forms(5, 2, 64)
    options = {"dtype": jnp.dtype("bfloat16"), "activation": "gelu_tanh"}
    gated = kernels.gated_activation(planes, **options)
    assert_same_bits(gated, kernels.gated_activation(whole, **options))
    assert_same_bits(kernels.gated_activation(whole[3:4], **options), gated[3:4])


def test_xla_adds_planes_in_order_and_rounds_before_it_adds_a_bias() -> None:
    planes, whole = both_forms(5, 64)
    bias = random(64)
    add = jax.jit(lambda value: total(value, 2, bias.dtype) + bias)
    assert_same_bits(add(planes), add(whole))
    text = add.trace(planes).lower(lowering_platforms=("cuda",)).as_text()
    assert "reduce_precision" in text and "stablehlo.reduce(" not in text


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("num_rows", "new_tokens"), [(5, 1), (5, 30), (3, 700)])
def test_no_product_of_a_model_is_left_to_xla(family: str, num_rows: int, new_tokens: int) -> None:
    config = tiny_config(**(SIZES | FAMILIES[family]))
    layout = WeightLayout.of_model(
        model_class(config.architecture),
        config,
        stack="all",
        dtype="bfloat16",
        kernels=invariant_kernels(),
    )
    geometries = cache_geometries(config, page_size=16, dtype="bfloat16")
    pages = (1 + PAGES_A_ROW * num_rows,) * len(geometries)
    cache = allocate_cache(geometries, pages, one_device())
    new = min(new_tokens, 16 * PAGES_A_ROW)
    step = Ragged(((0, new),) * num_rows, padding_tokens=num_rows * (new_tokens - new))
    batch = step.batch(len(geometries))
    if new_tokens == 1:
        batch = replace(batch, is_decode_only=True)
    forward = jax.jit(lambda leaves, batch, cache: layout.merge(leaves)(batch, cache))
    traced = forward.trace(layout.abstract(one_device()), batch, cache)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") >= 7
    assert "stablehlo.dot" not in text and "stablehlo.rsqrt" not in text


@pytest.mark.parametrize("num_rows", [1, 256])
@pytest.mark.parametrize("soft_cap", [None, 30.0])
def test_logits_are_the_kernels_too(num_rows: int, soft_cap: float | None) -> None:
    def lower(function: Any) -> str:
        run = jax.jit(lambda head, hidden: function(head, hidden, soft_cap))
        shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((256_000, 256), (num_rows, 256))]
        traced = run.trace(*shapes)
        assert (traced.out_info.shape, traced.out_info.dtype) == ((num_rows, 256_000), jnp.float32)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    text = lower(compute_invariant_logits)
    assert "@mosaic_gpu_v2" in text and "stablehlo.dot" not in text
    assert "stablehlo.dot" in lower(compute_logits)


def test_interpreted_logits_are_right() -> None:
    head, hidden = random(64, 512), random(9, 512)
    got = compute_invariant_logits(head, hidden, 5.0, interpret=plgpu.InterpretGPUParams())
    np.testing.assert_allclose(got, compute_logits(head, hidden, 5.0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "dtype", "message"),
    [
        ({}, "float32", "must have a 16-bit dtype; got float32"),
        ({"vocab_size": 100}, "bfloat16", "products of multiples of 64; got 256 times 100"),
        ({"intermediate_size": 72}, "bfloat16", "multiples of 64; got 256 times 144"),
        ({"hidden_size": 16448}, "bfloat16", "sizes that the kernels take; got hidden 16448"),
    ],
)
def test_a_model_that_the_kernels_do_not_take_is_told_why(
    changes: dict[str, Any], dtype: str, message: str
) -> None:
    refusal = invariance_refusal(tiny_config(**(SIZES | changes)), dtype, 64)
    assert refusal is not None and message in refusal


def test_other_models_are_not_refused() -> None:
    assert invariance_refusal(tiny_config(**SIZES), "bfloat16", 64) is None
