"""Parameters become leaves and come back the same model; loading takes one layer at a time."""

import functools
import gc
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.weight_layout import Stack, WeightLayout, WeightStore, make_dummy_leaves
from tests.models.stored_tensors import one_piece
from tests.models.tiny_models import (
    logits_of,
    make_layout,
    one_device,
    prompt_and_cache,
    random_parameters,
    tiny_config,
    total_bytes,
)

STACKS: tuple[Stack, ...] = ("none", "vectors", "all")
LAYERS = 3
PER_LAYER = {"LlamaForCausalLM": (4, 2), "Qwen3ForCausalLM": (4, 4)}
"""Parameters of more than one axis, and vectors, in each layer."""


def put(store: WeightStore, path: str, value: np.ndarray) -> None:
    store.put(path, one_piece(value))


def load(layout: WeightLayout, order: Sequence[int] | None = None) -> list[jax.Array]:
    """The random parameters, put in this order."""
    store, values = WeightStore(layout, one_device()), list(random_parameters(layout).items())
    for index in order if order is not None else range(len(values)):
        put(store, *values[index])
    return store.leaves()


@pytest.mark.parametrize("architecture", PER_LAYER)
@pytest.mark.parametrize("is_tied", [True, False])
def test_each_stacking_has_the_expected_number_of_leaves(architecture, is_tied):
    config = tiny_config(architectures=[architecture], tie_word_embeddings=is_tied)
    tensors, vectors = PER_LAYER[architecture]
    outside = 2 if is_tied else 3  # embedding, final norm, head
    counts = [len(make_layout(config, stack).leaves) for stack in STACKS]
    assert counts == [
        outside + LAYERS * (tensors + vectors),
        outside + LAYERS * tensors + vectors,
        outside + tensors + vectors,
    ]
    sizes = {make_layout(config, stack).num_bytes for stack in STACKS}
    assert sizes == {4 * sum(np.prod(p.shape) for p in make_layout(config).parameters)}


@pytest.mark.parametrize(
    ("architecture", "is_tied"), [("LlamaForCausalLM", True), ("Qwen3ForCausalLM", False)]
)
def test_every_stacking_gives_the_same_logits(architecture, is_tied):
    config = tiny_config(
        architectures=[architecture],
        num_hidden_layers=2,
        tie_word_embeddings=is_tied,
        attention_bias=not is_tied,
        mlp_bias=not is_tied,
    )
    batch, cache = prompt_and_cache(config)
    logits = []
    for stack in STACKS:
        layout = make_layout(config, stack)
        leaves = load(layout)
        logits.append(logits_of(layout, leaves, batch, cache))
    assert logits[0].shape == (5, config.vocab_size)
    assert logits[0].std() > 0.1
    np.testing.assert_array_equal(logits[1], logits[0])
    np.testing.assert_array_equal(logits[2], logits[0])


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_head_is_the_embedding_when_tied(is_tied):
    layout = make_layout(tiny_config(tie_word_embeddings=is_tied), "all")
    head = layout.leaves[layout.head_index]
    assert head.path == ("embed_tokens.weight" if is_tied else "lm_head.weight")
    assert head.shape == (11, 10)


@pytest.mark.parametrize("stack", STACKS)
def test_locate_finds_the_array_of_every_parameter(stack):
    layout = make_layout(tiny_config(), stack)
    leaves = load(layout)
    for path, value in random_parameters(layout).items():
        index, layer = layout.locate(path)
        found = leaves[index] if layer is None else leaves[index][layer]
        np.testing.assert_array_equal(np.asarray(found), value)
    if stack == "all":
        assert layout.locate("layers.2.mlp.down_proj.weight")[1] == 2


@pytest.mark.parametrize("stack", STACKS)
def test_parameters_may_be_put_in_any_order(stack):
    layout = make_layout(tiny_config(), stack)
    shuffled = np.random.default_rng(1).permutation(len(layout.parameters))
    for got, want in zip(load(layout, list(shuffled)), load(layout), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_leaves_have_the_shapes_and_types_of_the_layout():
    layout = make_layout(tiny_config(), "all", dtype="bfloat16")
    leaves = load(layout)
    abstract = layout.abstract(one_device())
    assert [(x.shape, x.dtype) for x in leaves] == [(x.shape, x.dtype) for x in abstract]
    assert {x.dtype for x in leaves} == {jnp.dtype("bfloat16")}
    assert total_bytes(leaves) == layout.num_bytes


@pytest.mark.parametrize("stack", STACKS)
def test_a_parameter_of_the_wrong_shape_is_refused(stack):
    layout = make_layout(tiny_config(), stack)
    store, path = WeightStore(layout, one_device()), "layers.1.input_layernorm.weight"
    message = rf"{path} must have shape \(10,\); got \(10, 1\)"
    with pytest.raises(ValueError, match=message):
        put(store, path, np.ones((10, 1), np.float32))
    assert path in store.missing


def test_what_was_not_put_is_missing():
    layout = make_layout(tiny_config(), "all")
    store, values = WeightStore(layout, one_device()), random_parameters(layout)
    assert set(store.missing) == set(values)
    absent = "layers.2.self_attn.o_proj.weight"
    for path, value in values.items():
        if path != absent:
            put(store, path, value)
    assert store.missing == (absent,)
    assert store.expects(absent) and not store.expects("layers.3.self_attn.o_proj.weight")
    put(store, absent, values[absent])
    assert store.missing == ()


def test_a_stack_is_updated_in_place():
    layout = make_layout(tiny_config(), "all")
    store = WeightStore(layout, one_device())
    shape = layout.leaves[layout.locate("layers.0.mlp.down_proj.weight")[0]].shape
    values = random_parameters(layout)
    gc.collect()
    others = {id(array) for array in jax.live_arrays()}
    for layer in range(LAYERS):
        path = f"layers.{layer}.mlp.down_proj.weight"
        before = [x for x in jax.live_arrays() if x.shape == shape and id(x) not in others]
        put(store, path, values[path])
        assert len(before) == (layer > 0)
        assert all(stack.is_deleted() for stack in before)


@pytest.mark.parametrize("stack", STACKS)
def test_putting_holds_the_weights_and_one_parameter_more(stack):
    """Counted on the device, where the stacks are updated in place."""
    layout = make_layout(tiny_config(hidden_size=512, num_hidden_layers=6), stack)
    values = random_parameters(layout)
    largest = max(value.nbytes for value in values.values())
    gc.collect()
    before = total_bytes(jax.live_arrays())
    store, peak = WeightStore(layout, one_device()), 0
    for path, value in values.items():
        put(store, path, value)
        peak = max(peak, total_bytes(jax.live_arrays()) - before)
    assert layout.num_bytes <= peak <= layout.num_bytes + largest
    assert len(store.leaves()) == len(layout.leaves)


@functools.cache
def dummy(stack: Stack, seed: int) -> tuple[WeightLayout, list[np.ndarray]]:
    sizes = dict(hidden_size=96, intermediate_size=64, vocab_size=300, num_hidden_layers=2)
    layout = make_layout(tiny_config(**sizes, head_dim=16), stack)
    return layout, [np.asarray(leaf) for leaf in make_dummy_leaves(layout, one_device(), seed)]


@pytest.mark.parametrize("stack", STACKS)
def test_dummy_weights_are_ones_in_norms_and_small_elsewhere(stack):
    layout, arrays = dummy(stack, 3)
    num_norms = 0
    for leaf, values in zip(layout.leaves, arrays, strict=True):
        assert (values.shape, values.dtype.name) == (leaf.shape, leaf.dtype)
        if leaf.path.endswith("norm.weight"):
            num_norms += 1
            assert (values == 1).all()
        else:
            assert np.isfinite(values).all()
            assert abs(values.mean()) < 2e-3
            assert 0.018 < values.std() < 0.022
    assert num_norms == {"none": 5, "vectors": 3, "all": 3}[stack]


@pytest.mark.parametrize("stack", ["none", "all"])
def test_dummy_weights_are_those_of_the_seed(stack):
    layout, first = dummy(stack, 3)
    again = make_dummy_leaves(layout, one_device(), 3)
    for leaf, a, b, c in zip(layout.leaves, first, again, dummy(stack, 4)[1], strict=True):
        np.testing.assert_array_equal(a, np.asarray(b))
        assert leaf.path.endswith("norm.weight") or not np.array_equal(a, c)


@pytest.mark.parametrize("stack", ["none", "all"])
def test_dummy_weights_of_two_layers_differ(stack):
    layout, arrays = dummy(stack, 3)
    layers = []
    for layer in range(2):
        index, place = layout.locate(f"layers.{layer}.mlp.down_proj.weight")
        layers.append(arrays[index] if place is None else arrays[index][place])
    assert layers[0].shape == layers[1].shape == (64, 96)
    assert not np.array_equal(*layers)
