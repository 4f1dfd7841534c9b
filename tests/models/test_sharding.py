"""Arrays are placed by the names of their axes; devices that share a model give its tokens."""

import jax
import pytest

from models.kv_cache import CACHE_AXES
from models.sharding import MESH_AXIS_OF, device_bytes, make_mesh, share_kv_heads
from tests.engine_runs import generate, shared_engine
from tests.models.four_devices import PROMPTS, ROWS, SAMPLED
from tests.models.on_four_devices import findings_of
from tests.models.tiny_models import make_layout, one_device, tiny_config

NUM_SPLIT = 2 + 3 * 4
"""Embedding and head, and the four products of each of three layers."""


@pytest.fixture(scope="module")
def on_four_devices() -> dict:
    """The findings of tests/models/four_devices.py."""
    return findings_of("tests.models.four_devices", timeout=280)


@pytest.mark.parametrize("stack", ["none", "all"])
def test_each_of_two_devices_holds_half_of_every_split_weight(on_four_devices, stack):
    leaves = on_four_devices["weights"][stack]
    assert sum(is_split for _, is_split, _ in leaves) == (NUM_SPLIT if stack == "none" else 6)
    for path, is_split, share in leaves:
        assert share == (0.5 if is_split else 1.0), path
        assert is_split != path.endswith("norm.weight"), path


def test_dummy_weights_are_split_alike(on_four_devices):
    assert on_four_devices["dummy"] == on_four_devices["weights"]["all"]


def test_a_vocabulary_that_does_not_divide_is_held_whole(on_four_devices):
    shares = {path: share for path, is_split, share in on_four_devices["uneven_vocab"] if is_split}
    assert len(shares) == NUM_SPLIT
    whole = {path for path, share in shares.items() if share == 1}
    assert whole == {"embed_tokens.weight", "lm_head.weight"}
    assert all(share == 0.5 for path, share in shares.items() if path not in whole)


def test_each_of_two_devices_holds_half_of_the_cache(on_four_devices):
    assert on_four_devices["cache"] == [0.5, 0.5]
    assert on_four_devices["engine"]["cache_shares_after"] == [0.5, 0.5]


def test_an_engine_on_two_devices_gives_the_golden_tokens(on_four_devices):
    found = on_four_devices["engine"]
    assert len(found["two"]) == 4
    assert found["two"] == found["golden"]


def test_more_devices_than_kv_heads_give_the_golden_tokens(on_four_devices):
    found = on_four_devices["engine"]
    assert found["cache_heads_of_four"] == 4
    assert found["four"] == found["golden"]


def test_two_devices_draw_the_tokens_of_one(on_four_devices):
    alone = generate(shared_engine().engine, PROMPTS, SAMPLED)
    assert [tuple(tokens) for tokens in on_four_devices["engine"]["sampled"]] == alone


def test_one_kv_head_biases_and_an_odd_vocabulary_give_the_tokens_of_one_device(on_four_devices):
    tokens = on_four_devices["odd_model"]
    assert tokens["4"] == tokens["1"]
    assert len({token for row in tokens["1"] for token in row}) > 10


def test_no_step_gathers_a_weight_or_the_logits_of_greedy_rows(on_four_devices):
    largest = on_four_devices["engine"]["largest_gathers"]
    assert largest["forward"] == 0
    assert largest["decode GREEDY"] == largest["sample GREEDY"] == 2 * ROWS  # the best of each half


def test_a_sampler_has_whole_rows_and_gathers_no_logits(on_four_devices):
    largest = on_four_devices["engine"]["largest_gathers"]
    assert largest["sample SAMPLED"] <= 8 * ROWS  # the logits are ROWS * 256


@pytest.mark.parametrize("kernel", ["decode", "prefill", "rotary_write"])
def test_a_kernel_on_four_devices_gives_the_bits_of_one(on_four_devices, kernel):
    assert on_four_devices["kernels"][kernel]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "three_devices",
            "tensor_parallel_size must divide num_key_value_heads = 2, or be a multiple of it "
            "that divides num_attention_heads = 4; got 3",
        ),
        (
            "uneven_mlp",
            "tensor_parallel_size must divide the model's intermediate_size = 97; got 2",
        ),
        ("five_devices", "tensor_parallel_size must be at most the number of devices, 4; got 5"),
    ],
)
def test_a_model_that_the_devices_cannot_share_is_refused(on_four_devices, case, message):
    assert on_four_devices["refusals"][case] == message


@pytest.mark.parametrize("num_devices", [1, 2])
def test_kv_heads_that_divide_leave_the_config_as_it_is(num_devices):
    config = tiny_config(num_attention_heads=4, num_key_value_heads=2)
    assert share_kv_heads(config, num_devices) is config


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_fewer_kv_heads_than_devices_are_copied(kv_heads):
    config = tiny_config(num_attention_heads=8, num_key_value_heads=kv_heads)
    shared = share_kv_heads(config, 4)
    assert (shared.num_key_value_heads, shared.num_query_heads_per_kv_head) == (4, 2)
    assert shared.kv_head_copies == 4 // kv_heads


@pytest.mark.parametrize(("heads", "kv_heads", "devices"), [(6, 3, 2), (12, 6, 4), (6, 2, 4)])
def test_heads_that_cannot_be_shared_are_refused(heads, kv_heads, devices):
    config = tiny_config(num_attention_heads=heads, num_key_value_heads=kv_heads)
    with pytest.raises(ValueError, match=f"num_key_value_heads = {kv_heads}, .*; got {devices}"):
        share_kv_heads(config, devices)


def test_more_devices_than_there_are_is_refused():
    count = len(jax.devices())
    message = f"at most the number of devices, {count}; got {count + 1}"
    with pytest.raises(ValueError, match=message):
        make_mesh(count + 1)


def test_one_device_needs_no_named_sharding():
    sharding = one_device().sharding((4, 2), ("vocab", "embed"))
    assert sharding == jax.sharding.SingleDeviceSharding(jax.devices()[0])


def test_one_device_holds_all_bytes():
    assert device_bytes(one_device().abstract((4, 3), "bfloat16", ("vocab", "embed"))) == 24


def test_every_axis_of_weights_and_cache_has_a_rule():
    config = tiny_config(architectures=["Qwen3ForCausalLM"], attention_bias=True, mlp_bias=True)
    leaves = make_layout(config, "all").leaves
    names = {axis for leaf in leaves for axis in leaf.axes} | set(CACHE_AXES)
    assert names == set(MESH_AXIS_OF)


def test_zeros_take_the_shapes_types_and_placement_asked_for():
    sharder = one_device()
    tree = {"a": sharder.replicated((2, 3), "int32"), "b": sharder.replicated((4,), "float16")}
    zeros = sharder.zeros(tree)
    for name, want in tree.items():
        got = zeros[name]
        assert (got.shape, got.dtype, got.sharding) == (want.shape, want.dtype, want.sharding)
        assert not got.any()
