"""What tests/models/test_sharding.py runs in a process that has four virtual CPU devices.

Prints one JSON object.
"""

import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxserve.engine import Engine
from jaxserve.errors import EngineConfigError
from jaxserve.execution.sample_mode import SampleMode
from jaxserve.sampling_params import SamplingParams
from models.config import ModelConfig
from models.kernels import HEADS, PAGES, model_kernels
from models.kv_cache import allocate_cache, cache_geometries
from models.sharding import MESH_AXIS_OF, Sharder, make_mesh
from models.weight_layout import Stack, WeightStore, make_dummy_leaves
from tests.engine_runs import generate, greedy, make_engine, sampled
from tests.goldens_loader import GreedyCase, load_golden
from tests.models.stored_tensors import one_piece
from tests.models.tiny_models import make_layout, random_parameters, tiny_config
from tests.pallas_kernels.paged_cases import PagedCase, make_inputs

NAME = "llama_gqa"
GOLDEN = load_golden(NAME)
CASES: list[GreedyCase] = [GOLDEN.alone, *GOLDEN.mixed[-3:]]
PROMPTS = [case.prompt for case in CASES]
ROWS = 4
HEAD_DIM, ODD_VOCAB = 16, 255
"""Of the golden; and a vocabulary that neither two nor four devices divide."""

SAMPLED: list[SamplingParams] = [
    sampled(seed=1),
    sampled(seed=2, top_p=0.9, temperature=0.7),
    sampled(seed=3, top_k=20, min_p=0.02, logprobs=3),
    sampled(seed=4, min_tokens=24, ignore_eos=False),
]


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
            store.put(path, one_piece(value))
        leaves = store.leaves()
    split = {axis for axis, mesh_axis in MESH_AXIS_OF.items() if mesh_axis == "model"}
    return [
        (leaf.path, bool(split.intersection(leaf.axes)), share(array))
        for leaf, array in zip(layout.leaves, leaves, strict=True)
    ]


def engine_on(num_devices: int, folder: Path = GOLDEN.folder, **settings) -> Engine:
    """A small engine whose layers are shared by so many devices."""
    small = {"max_num_seqs": ROWS, "row_buckets": (ROWS,), "max_num_batched_tokens": 32}
    small |= {"token_buckets": (32,), "tensor_parallel_size": num_devices}
    return make_engine(folder, **(small | settings)).engine


def refusal(num_devices: int, **overrides: int) -> str:
    """The sentence with which an engine is refused."""
    try:
        engine_on(num_devices, hf_overrides=overrides)
    except EngineConfigError as error:
        return str(error)
    return "not refused"


def largest_gathers(engine: Engine) -> dict[str, int]:
    """Elements of the largest array that devices gather, by kind of program and sample mode."""
    largest: dict[str, int] = {}
    table = engine.runner._programs
    table.sample(ROWS, SampleMode.SAMPLED)  # no step has used it
    for (kind, _, mode), program in table._programs.items():
        found = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", program.as_text() or "")
        sizes = [int(np.prod([int(size) for size in text.split(",")])) for text in found]
        name = kind if mode is None else f"{kind} {mode.name}"
        largest[name] = max(sizes, default=0)
    return largest


def tokens_of_shared_engines() -> dict:
    """Greedy and sampled tokens of two and four devices, beside the goldens."""
    two, four = engine_on(2), engine_on(4)
    return {
        "golden": [case.tokens for case in CASES],
        "two": generate(two, PROMPTS, greedy()),
        "four": generate(four, PROMPTS, greedy()),
        "cache_shares_after": [share(leaf) for leaf in jax.tree.leaves(two.runner._cache)],
        "cache_heads_of_four": four.runner._cache.groups[0].k_pages.shape[3],
        "sampled": generate(two, PROMPTS, SAMPLED),
        "largest_gathers": largest_gathers(two),
    }


def write_odd_model(folder: Path) -> None:
    """The golden with one KV head, biases, and a vocabulary of an odd size."""
    tensors = load_file(GOLDEN.folder / "model.safetensors")
    rng = np.random.default_rng(0)
    for name, tensor in list(tensors.items()):
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            tensors[name] = tensor = np.ascontiguousarray(tensor[:HEAD_DIM])
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            tensors[name] = np.ascontiguousarray(tensor[:ODD_VOCAB])
        if "self_attn" in name:
            bias = rng.normal(size=len(tensor)).astype(np.float32)
            tensors[name.replace("weight", "bias")] = bias
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((GOLDEN.folder / "config.json").read_text())
    config |= {"num_key_value_heads": 1, "vocab_size": ODD_VOCAB, "attention_bias": True}
    (folder / "config.json").write_text(json.dumps(config))


def tokens_of_an_odd_model() -> dict:
    """Greedy tokens of one device and of four."""
    prompts = [[token % ODD_VOCAB for token in prompt] for prompt in PROMPTS]
    with tempfile.TemporaryDirectory() as folder:
        write_odd_model(Path(folder))
        return {
            str(count): generate(engine_on(count, Path(folder)), prompts, greedy(max_tokens=24))
            for count in (1, 4)
        }


def kernels_on_four_devices() -> dict[str, bool]:
    """Whether each kernel gives, bit for bit, what it gives on one device."""
    sharder = Sharder(make_mesh(4))
    case = PagedCase((1, 1, 9, 70), (40, 3, 100, 70), heads=(8, 4, 64), first_row=2)
    q, k_pages, v_pages, layer, table, lens, starts = make_inputs(case)
    first_row, slots = np.array([case.first_row]), np.array([3, 16, 17, 40])
    qkv = jnp.concatenate([q[:4].reshape(4, 4, 2, 64), q[4:8].reshape(4, 4, 2, 64)], 2)
    angles = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 32)), jnp.float32)
    calls = {
        "decode": (q[:4], k_pages, v_pages, layer, table, lens),
        "prefill": (q, k_pages, v_pages, layer, table, lens, starts, first_row, q[:4]),
        "rotary_write": (qkv, k_pages, v_pages, layer, slots, *angles, None, None, None),
    }
    specs = {"decode": HEADS, "prefill": HEADS, "rotary_write": (HEADS, PAGES, PAGES)}

    def run(name: str, mesh: jax.sharding.Mesh | None) -> list[np.ndarray]:
        function = getattr(model_kernels("xla", "cpu", mesh), name)
        options = {"eps": 0.0, "gain_offset": 0.0} if name == "rotary_write" else case.options
        out = jax.jit(lambda *arrays: function(*arrays, **options))(*calls[name])
        if mesh is not None:
            for array, spec in zip(*map(jax.tree.leaves, (out, specs[name])), strict=True):
                assert array.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), array.ndim)
        return [np.asarray(array, np.float32) for array in jax.tree.leaves(out)]

    return {
        name: all(
            np.array_equal(*pair, equal_nan=True)
            for pair in zip(run(name, None), run(name, sharder.mesh), strict=True)
        )
        for name in calls
    }


def main() -> None:
    """Run everything."""
    sharder = Sharder(make_mesh(2))
    config = tiny_config(intermediate_size=6, vocab_size=12)
    geometries = cache_geometries(config, page_size=16, dtype="float32")
    stacks: Sequence[Stack] = ("none", "all")
    found = {
        "weights": {
            stack: shares_of_weights(config, sharder, stack, dummy=False) for stack in stacks
        },
        "dummy": shares_of_weights(config, sharder, "all", dummy=True),
        "uneven_vocab": shares_of_weights(
            tiny_config(intermediate_size=6, vocab_size=13), sharder, "none", dummy=True
        ),
        "cache": [
            share(leaf) for leaf in jax.tree.leaves(allocate_cache(geometries, (4,), sharder))
        ],
        "refusals": {
            "three_devices": refusal(3),
            "uneven_mlp": refusal(2, intermediate_size=97),
            "five_devices": refusal(5),
        },
        "engine": tokens_of_shared_engines(),
        "odd_model": tokens_of_an_odd_model(),
        "kernels": kernels_on_four_devices(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
