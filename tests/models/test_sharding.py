"""Arrays are placed by the names of their axes; on two devices each holds half."""

import json
import os
import subprocess
import sys

import jax
import pytest

from models.kv_cache import CACHE_AXES
from models.sharding import MESH_AXIS_OF, make_mesh
from tests.conftest import REPOSITORY
from tests.models.tiny_models import make_layout, one_device, tiny_config

NUM_SPLIT = 2 + 3 * 4
"""Embedding and head, and the four products of each of three layers."""


@pytest.fixture(scope="module")
def on_two_devices() -> dict:
    """The findings of tests/models/two_devices.py."""
    flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.models.two_devices"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("stack", ["none", "all"])
def test_each_of_two_devices_holds_half_of_every_split_weight(on_two_devices, stack):
    leaves = on_two_devices["weights"][stack]
    assert sum(is_split for _, is_split, _ in leaves) == (NUM_SPLIT if stack == "none" else 6)
    for path, is_split, share in leaves:
        assert share == (0.5 if is_split else 1.0), path
        assert is_split != path.endswith("norm.weight"), path


def test_dummy_weights_are_split_alike(on_two_devices):
    assert on_two_devices["dummy"] == on_two_devices["weights"]["all"]


def test_each_of_two_devices_holds_half_of_the_cache(on_two_devices):
    assert on_two_devices["cache"] == [0.5, 0.5]


def test_an_engine_on_two_devices_gives_the_golden_tokens(on_two_devices):
    found = on_two_devices["engine"]
    assert len(found["tokens"]) == 4
    assert found["tokens"] == found["golden"]
    assert found["cache_share_after"] == [0.5, 0.5]


def test_fewer_kv_heads_than_devices_are_refused(on_two_devices):
    want = "tensor_parallel_size must divide the model's kv_heads = 1; got 2"
    assert on_two_devices["one_kv_head"] == want


def test_more_than_one_gpu_is_refused(on_two_devices):
    want = "tensor_parallel_size is not supported on GPUs in this release; got 2"
    assert on_two_devices["on_gpu"] == want


def test_more_devices_than_there_are_is_refused():
    count = len(jax.devices())
    message = f"at most the number of devices, {count}; got {count + 1}"
    with pytest.raises(ValueError, match=message):
        make_mesh(count + 1)


def test_one_device_needs_no_named_sharding():
    sharding = one_device().sharding(("vocab", "embed"))
    assert sharding == jax.sharding.SingleDeviceSharding(jax.devices()[0])


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
