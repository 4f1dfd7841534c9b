"""The last layer keeps only the tokens whose hidden state is returned, and changes no result."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.batch import ForwardBatch
from models.config import ModelConfig
from models.kernels import ModelKernels, model_kernels
from models.kv_cache import KVCache, allocate_cache, cache_geometries
from models.layer_slice import LayerSlice
from models.registry import model_class
from models.weight_layout import Stack, WeightLayout
from tests.models.tiny_models import make_layout, one_device, random_parameters, tiny_config

PAGE_SIZE, PAGES_A_ROW = 16, 2

ONE_LAYER, TWO_LAYERS = {"num_hidden_layers": 1}, {"num_hidden_layers": 2}
GEMMA2 = {"architectures": ["Gemma2ForCausalLM"], "sliding_window": None}
CONFIGS: dict[str, tuple[dict[str, Any], Stack]] = {
    "one layer": (ONE_LAYER, "none"),
    "two layers": (TWO_LAYERS, "none"),
    "biases and stacked weights": (TWO_LAYERS | {"attention_bias": True, "mlp_bias": True}, "all"),
    "Gemma2 of one layer": (GEMMA2 | ONE_LAYER, "none"),
    "Gemma2 with windows": (GEMMA2 | TWO_LAYERS | {"sliding_window": 8}, "vectors"),
}


@dataclass(frozen=True)
class Ragged:
    """A step: (tokens in cache before it, new tokens) of each row; decode rows stand first."""

    rows: tuple[tuple[int, int], ...]
    num_decode_rows: int = 0
    padding_rows: int = 0
    padding_tokens: int = 0

    def batch(self, num_groups: int) -> ForwardBatch:
        """What the engine would make of it; row i owns the pages from `1 + i * PAGES_A_ROW` on."""
        S, num_new = len(self.rows) + self.padding_rows, [new for _, new in self.rows]
        T = sum(num_new) + self.padding_tokens
        starts = np.cumsum([0, *num_new, *[0] * self.padding_rows])
        tables = 1 + np.arange(S * PAGES_A_ROW).reshape(S, PAGES_A_ROW)
        tables[len(self.rows) :] = 0
        positions = np.zeros(T, np.int32)
        slots = np.arange(T) % PAGE_SIZE  # padding goes to the null page
        for row, (cached, new) in enumerate(self.rows):
            place = slice(starts[row], starts[row + 1])
            positions[place] = own = np.arange(cached, cached + new)
            slots[place] = tables[row, own // PAGE_SIZE] * PAGE_SIZE + own % PAGE_SIZE
        seq_lens = [cached + new for cached, new in self.rows] + [0] * self.padding_rows
        return ForwardBatch(
            token_ids=jnp.asarray(np.random.default_rng(1).integers(0, 11, T), jnp.int32),
            positions=jnp.asarray(positions)[None],
            slot_mapping=(jnp.asarray(slots, jnp.int32),) * num_groups,
            page_tables=(jnp.asarray(tables, jnp.int32),) * num_groups,
            seq_lens=jnp.asarray(seq_lens, jnp.int32),
            query_start_loc=jnp.asarray(starts, jnp.int32),
            num_decode_rows=jnp.array([self.num_decode_rows], jnp.int32),
            logits_indices=jnp.asarray(np.maximum(starts[1:] - 1, 0), jnp.int32),
        )


STEPS = {
    "one prompt": Ragged(((0, 5),)),
    "decode rows before chunks": Ragged(
        ((9, 1), (17, 1), (0, 7), (6, 12)), num_decode_rows=2, padding_rows=3, padding_tokens=5
    ),
    "only decode rows, in a mixed bucket": Ragged(
        ((4, 1), (20, 1), (0, 1)), num_decode_rows=3, padding_rows=2, padding_tokens=6
    ),
}


def filled_cache(config: ModelConfig, step: Ragged) -> KVCache:
    """Pages that already hold something, since rows have tokens in them."""
    geometries = cache_geometries(config, page_size=PAGE_SIZE, dtype="float32")
    num_pages = 1 + PAGES_A_ROW * (len(step.rows) + step.padding_rows)
    cache = allocate_cache(geometries, (num_pages,) * len(geometries), one_device())
    rng = np.random.default_rng(2)
    return jax.tree.map(lambda pages: jnp.asarray(rng.normal(size=pages.shape), "float32"), cache)


def assert_near(got: jax.Array, want: jax.Array) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def random_leaves(layout: WeightLayout) -> list[jax.Array]:
    """Weights of the layout; a stack is made of its layers' parts."""
    parameters = random_parameters(layout)
    leaves = [np.zeros(leaf.shape, np.float32) for leaf in layout.leaves]
    for path, value in parameters.items():
        index, layer = layout.locate(path)
        leaves[index][... if layer is None else layer] = value
    return [jnp.asarray(leaf) for leaf in leaves]


def jitted(layout: WeightLayout) -> Callable[..., tuple[jax.Array, KVCache]]:
    """The model, with random weights."""
    forward = jax.jit(lambda leaves, batch, cache: layout.merge(leaves)(batch, cache))
    return functools.partial(forward, random_leaves(layout))


DECODE_AND_CHUNKS = STEPS["decode rows before chunks"]
CASES = [(name, "decode rows before chunks") for name in CONFIGS] + [
    ("one layer", name) for name in STEPS if STEPS[name] is not DECODE_AND_CHUNKS
]


@pytest.mark.parametrize(("config_name", "step_name"), CASES)
def test_rows_are_those_of_a_pass_that_keeps_all_tokens(config_name: str, step_name: str) -> None:
    (changes, stack), step = CONFIGS[config_name], STEPS[step_name]
    config = tiny_config(**changes)
    layout = make_layout(config, stack)
    model, cache = jitted(layout), filled_cache(config, step)
    batch = step.batch(len(cache.groups))
    hidden, written = model(batch, cache)
    every_token = jnp.arange(batch.token_ids.shape[0])
    whole, all_written = model(replace(batch, logits_indices=every_token), cache)
    assert whole.shape == (len(every_token), config.hidden_size)
    assert_near(hidden, whole[batch.logits_indices])
    jax.tree.map(assert_near, written, all_written)


def test_any_tokens_may_be_asked_for_in_any_order_and_twice() -> None:
    config = tiny_config(**ONE_LAYER)
    layout = make_layout(config)
    model, cache = jitted(layout), filled_cache(config, DECODE_AND_CHUNKS)
    batch = DECODE_AND_CHUNKS.batch(1)
    whole, _ = model(replace(batch, logits_indices=jnp.arange(26)), cache)
    asked = jnp.array([20, 3, 3, 0])
    hidden, _ = model(replace(batch, logits_indices=asked), cache)
    assert_near(hidden, whole[asked])


def rows_of_products(config: ModelConfig, batch: ForwardBatch, cache: KVCache) -> list[int]:
    """Rows of each product of a pass, in order; layers that share a trace count once."""
    plain, rows = model_kernels("xla", "cpu"), []

    def product(x: jax.Array, weight: LayerSlice, num_in_dims: int) -> jax.Array:
        rows.append(x.shape[0])
        return plain.product(x, weight, num_in_dims)

    kernels: ModelKernels = replace(plain, product=product)
    layout = WeightLayout.of_model(
        model_class(config.architecture), config, stack="none", dtype="float32", kernels=kernels
    )
    leaves = random_leaves(layout)
    jax.eval_shape(lambda batch, cache: layout.merge(leaves)(batch, cache), batch, cache)
    return rows


@pytest.mark.parametrize("family", [{}, GEMMA2], ids=["Llama", "Gemma2"])
@pytest.mark.parametrize("num_layers", [1, 4])
def test_after_attention_the_last_layer_multiplies_only_the_rows_of_logits(
    family: dict[str, Any], num_layers: int
) -> None:
    config = tiny_config(**family, num_hidden_layers=num_layers)
    cache = filled_cache(config, DECODE_AND_CHUNKS)
    rows = rows_of_products(config, DECODE_AND_CHUNKS.batch(1), cache)
    T, R = 26, 7
    # The layers between the first, which has no delta, and the last are traced once.
    others = min(num_layers - 1, 2)
    assert rows == [T] * 4 * others + [T, R, R, R]


def test_a_decode_step_keeps_its_rows_as_they_are() -> None:
    config = tiny_config(**ONE_LAYER)
    step = Ragged(((4, 1), (20, 1), (0, 1)), num_decode_rows=3)
    layout = make_layout(config)
    model, cache = jitted(layout), filled_cache(config, step)
    mixed = step.batch(1)
    decode = replace(mixed, is_decode_only=True, logits_indices=jnp.zeros(3, jnp.int32))
    assert_near(model(decode, cache)[0], model(mixed, cache)[0])


@pytest.mark.parametrize("family", [{}, GEMMA2], ids=["Llama", "Gemma2"])
@pytest.mark.parametrize(("num_rows", "is_skinny"), [(5, True), (67, False)])
def test_the_mosaic_kernels_take_rows_that_are_no_multiple_of_eight(
    family: dict[str, Any], num_rows: int, is_skinny: bool
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 128, "head_dim": 64}
    config = tiny_config(**family, **sizes, num_hidden_layers=2)
    layout = WeightLayout.of_model(
        model_class(config.architecture),
        config,
        stack="all",
        dtype="bfloat16",
        kernels=model_kernels("mosaic", "gpu"),
    )
    step = Ragged(((0, 2),) * num_rows, padding_tokens=72)
    geometries = cache_geometries(config, page_size=PAGE_SIZE, dtype="bfloat16")
    cache = allocate_cache(geometries, (1 + PAGES_A_ROW * num_rows,), one_device())
    forward = jax.jit(lambda leaves, batch, cache: layout.merge(leaves)(batch, cache))
    traced = forward.trace(layout.abstract(one_device()), step.batch(1), cache)
    assert traced.out_info[0].shape == (num_rows, 256)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert (f"x{num_rows}x256xf32" in text) == is_skinny  # o_proj and down_proj as partial sums
