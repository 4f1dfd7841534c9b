"""Check a model that two GPUs share: one JSON line a check; the exit code is 1 if any fails.

    python benchmarks/check_tensor_parallel.py [--devices 2] [--layers 4] [--shapes a,b]
        [--backends mosaic,xla] [--seconds 170]

First the attention kernels on random data, split over the devices and alone; then, for each
shape of `shapes/`, a few layers with random weights: greedy tokens and log-probabilities of all
devices beside those of one, and the bytes that the first device holds. Each part runs in a
process of its own, all at the same time, so that one that hangs or fails does not end the others.
The collectives are NCCL's; NCCL_NVLS_ENABLE=0 in the environment keeps NVLink multicast off.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

KERNEL_TOLERANCE = 0.01
"""Relative error in bfloat16: each device may cut the contexts at other places."""
CLEAR_MARGIN = 0.15
"""Logits whose best two are further apart than this must give the same token."""
LOGPROB_TOLERANCE = 0.1
NUM_PROMPTS, NUM_TOKENS = 24, 12

# name -> (N, K, H), options
KERNEL_CASES: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "llama-3-8b": ((32, 8, 128), {}),
    "qwen3-0.6b": ((16, 8, 128), {}),
    "one KV head a device": ((16, 2, 128), {}),
    "window and cap": ((8, 4, 256), {"sliding_window": 100, "soft_cap": 20.0}),
}


def main() -> int:
    """Run each part in its own process and print what it finds."""
    arguments = read_arguments()
    if arguments.part is not None:
        lines = part_lines(arguments)
        return min(1, sum(not emit(line) for line in lines))
    parts = ["kernels", *arguments.shapes.split(",")]
    with ThreadPoolExecutor(len(parts)) as pool:
        passed = list(pool.map(lambda part: run_part(part, arguments.seconds), parts))
    return 0 if all(passed) else 1


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--shapes", default="qwen3-0.6b,llama-3-8b")
    parser.add_argument("--backends", default="mosaic,xla")
    parser.add_argument("--seconds", type=float, default=170, help="limit of one part")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    return parser.parse_args()


def run_part(part: str, limit: float) -> bool:
    """Whether every check of a part passed; its lines go straight to our output.

    The parts share the GPUs' memory, so each gets a share of it.
    """
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.28"} | os.environ
    command = [sys.executable, str(HERE / Path(__file__).name), *sys.argv[1:], "--part", part]
    start = time.monotonic()
    try:
        code = subprocess.run(command, timeout=limit, cwd=HERE.parent, env=environment).returncode
        error = f"exit code {code}"
    except subprocess.TimeoutExpired:
        code, error = 1, f"not finished after {limit:.0f} s"
    seconds = round(time.monotonic() - start, 1)
    return emit(
        {"part": part, "ok": code == 0, "seconds": seconds} | ({"error": error} if code else {})
    )


def emit(line: dict[str, Any]) -> bool:
    """Print one line; whether it is good news."""
    print(json.dumps(line), flush=True)
    return bool(line["ok"])


def part_lines(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The checks of one part; one that raises is a line, too."""
    backends = arguments.backends.split(",")
    if arguments.part == "kernels":
        import jax

        devices = [device.device_kind for device in jax.devices()]
        enough = len(devices) >= arguments.devices
        yield {"check": "devices", "ok": enough, "devices": devices, "jax": jax.__version__}
        for backend in backends:
            for name in KERNEL_CASES:
                for kernel in ("decode", "prefill", "rotary_write"):
                    title = f"{kernel} {backend} {name}"
                    yield guarded(title, check_kernel, backend, kernel, name, arguments.devices)
        return
    for name, check in shape_checks(arguments, backends):
        yield guarded(f"{arguments.part} {name}", check)


def guarded(title: str, check: Any, *values: Any) -> dict[str, Any]:
    """The result of a check under its title; an exception is a failure with its text."""
    start = time.monotonic()
    try:
        result = check(*values)
    except Exception as error:
        result = {"ok": False, "error": f"{type(error).__name__}: {str(error)[:1500]}"}
    return {"check": title, **result, "seconds": round(time.monotonic() - start, 1)}


def check_kernel(backend: Any, kernel: str, case: str, num_devices: int) -> dict[str, Any]:
    """One kernel on arrays that the devices share, beside the same on one device."""
    import jax
    import numpy as np

    from models.kernels import HEADS, PAGES, WHOLE, model_kernels
    from models.sharding import make_mesh

    heads, options = KERNEL_CASES[case]
    mesh = make_mesh(num_devices)
    arrays, kinds = kernel_inputs(kernel, heads)
    if kernel == "rotary_write":
        options = {"eps": 0.0, "gain_offset": 0.0}
    else:
        options = {"scale": heads[2] ** -0.5, "sliding_window": None, "soft_cap": None} | options
    head_rows = jax.P(None, "model", None, None)
    specs = {"heads": HEADS, "pages": PAGES, "whole": WHOLE, "head rows": head_rows}
    split = [
        jax.device_put(array, jax.NamedSharding(mesh, specs[kind]))
        for array, kind in zip(arrays, kinds, strict=True)
    ]
    nothing = [None] * 3 if kernel == "rotary_write" else []  # no bias, no norms
    platform = jax.default_backend()

    def run(on: Any, inputs: list[Any]) -> Any:
        function = getattr(model_kernels(backend, platform, on), kernel)
        out = jax.jit(lambda *inputs: function(*inputs, *nothing, **options))(*inputs)
        return jax.tree.leaves(out)

    errors, shares = [], []
    for together, alone in zip(run(mesh, split), run(None, arrays), strict=True):
        got, want = (np.asarray(x.astype("float32")) for x in (together, alone))
        errors.append(float(np.linalg.norm(got - want) / np.linalg.norm(want)))
        shares.append(together.addressable_shards[0].data.nbytes / together.nbytes)
    error, share = max(errors), max(shares)
    is_good = error <= (0 if kernel == "rotary_write" else KERNEL_TOLERANCE)
    return {"ok": is_good and share == 1 / num_devices, "error": round(error, 6), "share": share}


def kernel_inputs(kernel: str, heads: tuple[int, int, int]) -> tuple[list[Any], list[str]]:
    """Arrays of one kernel on a small random cache, and how each of them is split."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    N, K, H = heads
    queries, lens = [1, 1, 1, 300, 77], [900, 33, 64, 500, 77]
    starts = np.cumsum([0, *queries])
    used = [-(-length // 16) for length in lens]
    ids = np.random.default_rng(0).permutation(sum(used)).astype(np.int32) + 1
    table = np.zeros((len(used), max(used)), np.int32)
    for row, count in enumerate(used):
        table[row, :count] = ids[sum(used[:row]) :][:count]

    def random(seed: int, *shape: int) -> Any:
        return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)

    def numbers(values: Any) -> Any:
        return jnp.asarray(values, jnp.int32)

    pages = [random(seed, 2, sum(used) + 1, 16, K, H) for seed in (1, 2)]
    rows = len(lens) if kernel == "decode" else int(starts[-1])
    cache = [*pages, numbers([1]), numbers(table), numbers(lens)]
    kinds = ["heads", "pages", "pages", "whole", "whole", "whole"]
    if kernel == "decode":
        return [random(3, rows, N, H), *cache], kinds
    if kernel == "prefill":
        inputs = [random(3, rows, N, H), *cache, numbers(starts), numbers([3]), random(4, 3, N, H)]
        return inputs, [*kinds, "whole", "whole", "heads"]
    slots = np.random.default_rng(1).permutation(sum(used) * 16)[:rows] + 16
    angles = [jax.random.normal(jax.random.key(seed), (rows, H // 2)) for seed in (5, 6)]
    qkv = random(3, rows, K, N // K + 2, H)
    inputs = [qkv, *pages, numbers([1]), numbers(slots), *angles]
    return inputs, ["head rows", "pages", "pages", *["whole"] * 4]


def shape_checks(arguments: argparse.Namespace, backends: list[str]) -> Iterator[tuple[str, Any]]:
    """The reference of one device by the first backend that it can run, then all devices."""
    reference: dict[str, Any] = {}

    def run_alone() -> dict[str, Any]:
        reference.update(run_model(arguments, backends[0], 1))
        return {"ok": True, "total_bytes": reference["bytes"], **reference["times"]}

    def compare(backend: str) -> dict[str, Any]:
        found = run_model(arguments, backend, arguments.devices)
        return compare_models(reference, found, arguments.devices)

    yield f"{backends[0]} on 1 device", run_alone
    for backend in backends:
        yield f"{backend} on {arguments.devices} devices", lambda b=backend: compare(b)


def run_model(arguments: argparse.Namespace, backend: str, num_devices: int) -> dict[str, Any]:
    """Greedy tokens, log-probabilities of the best two, and bytes on the first device."""
    import random

    import jax

    from jaxserve import LLM, SamplingParams

    start = time.monotonic()
    llm = LLM(
        str(HERE / "shapes" / arguments.part),
        load_format="dummy",
        skip_tokenizer_init=True,
        tensor_parallel_size=num_devices,
        attention_backend=backend,
        hf_overrides={"num_hidden_layers": arguments.layers},
        max_model_len=1024,
        num_gpu_blocks_override=2048,
        max_num_seqs=NUM_PROMPTS,
        max_num_batched_tokens=512,
        row_buckets=[NUM_PROMPTS],
        token_buckets=[512],
    )
    ready = time.monotonic()
    rng = random.Random(5)
    lengths = [rng.randint(1, 400) for _ in range(NUM_PROMPTS)]
    prompts = [
        {"prompt_token_ids": [rng.randrange(1000, 120_000) for _ in range(n)]} for n in lengths
    ]
    greedy = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False}
    plain = llm.generate(prompts, SamplingParams(**greedy), use_tqdm=False)
    scored = llm.generate(prompts, SamplingParams(**greedy, logprobs=2), use_tqdm=False)
    leaves = llm.engine.runner._leaves
    result = {
        "plain": [list(output.outputs[0].token_ids) for output in plain],
        "tokens": [list(output.outputs[0].token_ids) for output in scored],
        "logprobs": [
            [sorted((p.logprob for p in step.values()), reverse=True) for step in logprobs]
            for logprobs in (output.outputs[0].logprobs or [] for output in scored)
        ],
        "bytes": sum(leaf.nbytes for leaf in leaves),
        "first_bytes": sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves),
        "cache_shares": [
            leaf.addressable_shards[0].data.nbytes / leaf.nbytes
            for leaf in jax.tree.leaves(llm.engine.runner._cache)
        ],
        "times": {
            "start_seconds": round(ready - start, 1),
            "run_seconds": round(time.monotonic() - ready, 1),
        },
    }
    del llm, leaves
    gc.collect()
    return result


def compare_models(want: dict[str, Any], got: dict[str, Any], num_devices: int) -> dict[str, Any]:
    """Tokens until the first that differs in each prompt; there the margin must be small."""
    if not want:
        return {"ok": False, "error": "one device gave no reference"}
    equal, unclear, worst, drift = 0, 0, 0.0, 0.0
    for tokens_of in ("plain", "tokens"):
        for row, tokens in enumerate(want["tokens"]):
            for step, token in enumerate(tokens):
                first, second = want["logprobs"][row][step][:2]
                if got[tokens_of][row][step] != token:
                    unclear, worst = unclear + 1, max(worst, first - second)
                    break
                equal += 1
                if tokens_of == "tokens":
                    drift = max(drift, abs(got["logprobs"][row][step][0] - first))
    share = got["first_bytes"] / got["bytes"]
    halves = all(part == 1 / num_devices for part in got["cache_shares"])
    is_split = halves and share < 1 / num_devices + 0.01
    return {
        "ok": is_split and worst <= CLEAR_MARGIN and drift <= LOGPROB_TOLERANCE and equal > 0,
        "equal_tokens": equal,
        "rows_that_part": unclear,
        "rows": 2 * len(want["tokens"]),
        "largest_margin_where_they_part": round(worst, 4),
        "largest_logprob_difference": round(drift, 5),
        "first_device_bytes": got["first_bytes"],
        "total_bytes": got["bytes"],
        "cache_share": got["cache_shares"][0],
        **got["times"],
    }


if __name__ == "__main__":
    sys.exit(main())
