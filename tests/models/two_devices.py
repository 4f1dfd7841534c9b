"""What tests/models/test_sharding.py runs in a process that has two virtual CPU devices.

Prints one JSON object.
"""

import json
from unittest import mock

import jax

from jaxserve.errors import EngineConfigError
from models.config import ModelConfig
from models.kv_cache import allocate_cache, cache_geometries
from models.sharding import MESH_AXIS_OF, Sharder, make_mesh
from models.weight_layout import Stack, WeightStore, make_dummy_leaves
from tests.engine_runs import generate, greedy, make_engine
from tests.goldens_loader import GOLDENS_FOLDER, load_golden
from tests.models.tiny_models import make_layout, random_parameters, tiny_config

NAME = "llama_gqa"
NUM_MIXED = 3
SMALL = {"max_num_seqs": 4, "row_buckets": (4,), "max_num_batched_tokens": 32}


def share(array: jax.Array) -> float:
    """The part of an array that one device holds."""
    return array.addressable_shards[0].data.nbytes / array.nbytes


def shares_of_weights(config: ModelConfig, sharder: Sharder, stack: Stack, *, dummy: bool) -> list:
    """(path, whether it is to be split, share) of each leaf."""
    layout = make_layout(config, stack)
    if dummy:
        leaves = make_dummy_leaves(layout, sharder, seed=0)
    else:
        store = WeightStore(layout, sharder)
        for path, value in random_parameters(layout).items():
            store.put(path, value)
        leaves = store.leaves()
    split = {axis for axis, mesh_axis in MESH_AXIS_OF.items() if mesh_axis == "model"}
    return [
        (leaf.path, bool(split.intersection(leaf.axes)), share(array))
        for leaf, array in zip(layout.leaves, leaves, strict=True)
    ]


def refusal(folder: str = NAME, **settings) -> str:
    """The sentence with which an engine on two devices is refused."""
    try:
        make_engine(GOLDENS_FOLDER / folder, tensor_parallel_size=2, **settings)
    except EngineConfigError as error:
        return str(error)
    return "not refused"


def engine_tokens() -> dict:
    """Greedy tokens of an engine on two devices, beside the goldens."""
    golden = load_golden(NAME)
    engine = make_engine(golden.folder, tensor_parallel_size=2, **SMALL, token_buckets=(32,)).engine
    cases = [golden.alone, *golden.mixed[-NUM_MIXED:]]
    tokens = generate(engine, [case.prompt for case in cases], greedy())
    cache = engine.runner._cache
    return {
        "tokens": tokens,
        "golden": [case.tokens for case in cases],
        "cache_share_after": [share(leaf) for leaf in jax.tree.leaves(cache)],
    }


def main() -> None:
    """Run everything."""
    sharder = Sharder(make_mesh(2))
    config = tiny_config(intermediate_size=6, vocab_size=12)
    geometries = cache_geometries(config, page_size=16, dtype="float32")
    cache = allocate_cache(geometries, (4,), sharder)
    with mock.patch.object(jax, "default_backend", lambda: "gpu"):
        on_gpu = refusal()
    found = {
        "weights": {
            stack: shares_of_weights(config, sharder, stack, dummy=False)
            for stack in ("none", "all")
        },
        "dummy": shares_of_weights(config, sharder, "all", dummy=True),
        "cache": [share(leaf) for leaf in jax.tree.leaves(cache)],
        "one_kv_head": refusal(hf_overrides={"num_key_value_heads": 1}),
        "on_gpu": on_gpu,
        "engine": engine_tokens(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
