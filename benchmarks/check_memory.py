"""Check on a GPU what memory and scheduling promise: each check prints one JSON line.

    python benchmarks/check_memory.py MODEL [CHECK ...] [FLAG=VALUE ...]

Random weights. A FLAG is an engine argument; `num_layers=4` cuts the model short. Tokens are
compared with those of an engine whose memory suffices; in bfloat16 a row's neighbours may decide
between two tokens that are nearly equal, so each difference comes with the margin that it had.
"""

import dataclasses
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")

import jax
import jax.numpy as jnp

from benchmarks.memory_bench import (
    MAX_MODEL_LEN,
    OUTPUT_TOKENS,
    Bench,
    add,
    generate,
    greedy,
    timed,
    tokens_of,
)
from jaxserve import LLM

SPARED_BYTES = 16 << 20
SMALL_POOL = 420  # pages: about 20 of the 48 requests of `Bench.prompts`

Checks = dict[str, Callable[["Bench"], dict[str, Any]]]
CHECKS: Checks = {}


def check(function: Callable[["Bench"], dict[str, Any]]) -> Callable[["Bench"], dict[str, Any]]:
    """Register a check under its function's name."""
    CHECKS[function.__name__] = function
    return function


@check
def small_pool(bench: Bench) -> dict[str, Any]:
    """F05: 48 requests on a pool of 20; preempted by recomputing and by swapping."""
    prompts, result = bench.prompts(1), {}
    modes = {"recompute": {}, "swap": {"kv_offloading_size": 2, "preemption_mode": "swap"}}
    for mode, flags in modes.items():
        llm = bench.build(num_gpu_blocks_override=SMALL_POOL, **flags)
        tokens_of(llm, bench.prompts(2, 8))
        answers, seconds = timed(lambda llm=llm: tokens_of(llm, prompts))
        runner = llm.engine.runner
        result[mode] = bench.compare(prompts, answers) | {
            "seconds": round(seconds, 3),
            "preemptions": llm.engine.scheduler.num_preemptions,
            "host_hits": llm.engine.scheduler.num_host_prefix_hits,
            "computed_tokens": llm.engine.times.num_tokens,
        }
        mover = runner.page_mover
        if mover is not None:
            result[mode] |= {
                "offloaded": mover.num_offloaded_bytes,
                "fetched": mover.num_fetched_bytes,
            }
            per_page = mover.seconds_per_page
            if per_page is not None:
                result[mode] |= {
                    "offload_us_a_page": round(per_page.offload * 1e6, 2),
                    "fetch_us_a_page": round(per_page.fetch * 1e6, 2),
                }
        del llm, runner, mover
    return result


@check
def host_tier(bench: Bench) -> dict[str, Any]:
    """Prefixes that were evicted come back from the host's memory, byte for byte."""
    llm = bench.build(num_gpu_blocks_override=1400, kv_offloading_size=4, preemption_mode="swap")
    first, second = bench.prompts(3, 16, 1000, 1200), bench.prompts(4, 16, 1000, 1200)
    before, cold = timed(lambda: tokens_of(llm, first))
    tokens_of(llm, second)  # evicts the first ones
    hits = llm.engine.scheduler.num_host_prefix_hits
    after, warm = timed(lambda: tokens_of(llm, first))
    return {
        "host_hits": llm.engine.scheduler.num_host_prefix_hits - hits,
        "answers": len(after),
        "equal": sum(a == b for a, b in zip(before, after, strict=True)),
        "cold_seconds": round(cold, 3),
        "warm_seconds": round(warm, 3),
    }


def _device_bytes() -> int:
    """What this process holds of the device's memory."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_in_use", 0)


@check
def sleep(bench: Bench) -> dict[str, Any]:
    """Bytes and seconds of each level, and the tokens after waking up."""
    llm, prompts, result = bench.build(), bench.prompts(5, 8), {}
    before = tokens_of(llm, prompts)
    for level in (1, 2):
        awake = _device_bytes()
        _, asleep_seconds = timed(lambda level=level: llm.sleep(level))
        asleep = _device_bytes()
        _, awake_seconds = timed(lambda: jax.block_until_ready(llm.wake_up()))
        result[f"level_{level}"] = {
            "bytes_awake": awake,
            "bytes_asleep": asleep,
            "seconds_to_sleep": round(asleep_seconds, 3),
            "seconds_to_wake": round(awake_seconds, 3),
            "equal": tokens_of(llm, prompts) == before,
        }
    awake = _device_bytes()
    llm.release_kv_cache_memory()
    result["released_bytes"] = awake - _device_bytes()
    result["equal_after_release"] = tokens_of(llm, prompts) == before
    return result


@check
def snapshot(bench: Bench) -> dict[str, Any]:
    """A named prefix survives a restart of the engine."""
    (prefix,) = bench.prompts(6, 1, 1600, 1601)
    prompts = [[*prefix, *ids] for ids in bench.prompts(7, 4, 20, 40)]
    with tempfile.TemporaryDirectory() as folder:
        llm = bench.build()
        before = tokens_of(llm, prompts)
        saved, save_seconds = timed(
            lambda llm=llm: llm.save_prefix("p", {"prompt_token_ids": prefix}, folder=folder)
        )
        num_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
        del llm
        llm = bench.build()
        loaded, load_seconds = timed(lambda llm=llm: llm.load_prefix("p", folder=folder))
        hits = llm.engine.scheduler.num_prefix_hits
        after = tokens_of(llm, prompts)
    return {
        "saved_tokens": saved,
        "loaded_tokens": loaded,
        "bytes": num_bytes,
        "save_seconds": round(save_seconds, 3),
        "load_seconds": round(load_seconds, 3),
        "hits": llm.engine.scheduler.num_prefix_hits - hits,
        "equal": sum(a == b for a, b in zip(before, after, strict=True)),
        "answers": len(after),
    }


@check
def poison(bench: Bench) -> dict[str, Any]:
    """No kernel reads a page that it may not: free pages are NaN, and all answers are finite."""
    prompts = bench.prompts(1)
    llm = bench.build(num_gpu_blocks_override=SMALL_POOL, debug_poison_pages=True)
    answers = tokens_of(llm, prompts)
    return bench.compare(prompts, answers) | {
        "preemptions": llm.engine.scheduler.num_preemptions,
    }


@check
def nan_row(bench: Bench) -> dict[str, Any]:
    """F13: a row whose logits are NaN ends alone; its neighbours' tokens are as without it."""
    llm, prompts = bench.build(enable_prefix_caching=False), bench.prompts(8, 8)
    before = tokens_of(llm, prompts)
    engine, params = llm.engine, greedy(OUTPUT_TOKENS)
    requests = add(llm, prompts, params)
    tokens: dict[str, list[int]] = {name: [] for name in requests}
    reasons = {}

    def step() -> None:
        for update in engine.step():
            tokens[update.request_id] += update.new_token_ids
            if update.finish_reason is not None:
                reasons[update.request_id] = str(update.finish_reason)

    while not all(tokens.values()):
        step()
    (ill,) = engine.scheduler._roster.find(requests[7], None)
    page = ill.page_tables[0][0]
    engine.runner.change_cache(lambda cache: _spoil(cache, page))
    while engine.has_unfinished:
        step()
    after = [tokens[name] for name in requests]
    return {
        "reasons": sorted({reasons[name] for name in requests[:7]}),
        "reason_of_ill": reasons[requests[7]],
        "neighbours_equal": sum(a == b for a, b in zip(before[:7], after[:7], strict=True)),
    }


def _spoil(cache: Any, page: int) -> Any:
    group = cache.groups[0]
    return cache.with_group(
        0, dataclasses.replace(group, k_pages=group.k_pages.at[:, page].set(jnp.nan))
    )


@check
def out_of_memory(bench: Bench) -> dict[str, Any]:
    """F13: the device has no memory left for a step: it runs smaller, and the next one runs."""
    if jax.default_backend() == "cpu":
        return {"skipped": "the memory of a CPU is that of the whole machine"}
    llm, prompts = bench.build(enable_prefix_caching=False), bench.prompts(9, 24)
    before = tokens_of(llm, prompts)
    hogs, size = [], 1 << 30
    while size >= 1 << 18:
        try:
            hogs.append(jax.block_until_ready(jnp.zeros(size, jnp.uint8)))
        except jax.errors.JaxRuntimeError:
            size //= 2
    while hogs and hogs[-1].nbytes <= SPARED_BYTES:
        hogs.pop()  # the smallest steps shall find some
    held = sum(hog.nbytes for hog in hogs)
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    try:
        outputs = llm.generate(inputs, greedy(OUTPUT_TOKENS), use_tqdm=False)
        reasons = [str(output.outputs[0].finish_reason) for output in outputs]
        during = [list(output.outputs[0].token_ids) for output in outputs]
    except Exception as error:
        reasons, during = [repr(error)[:300]], []
    hogs.clear()
    gc.collect()
    after, is_dead = [], llm.engine.is_dead
    if not is_dead:
        after = tokens_of(llm, prompts)
    return {
        "bytes_taken": held,
        "reasons": {reason: reasons.count(reason) for reason in reasons},
        "equal_during": sum(a == b for a, b in zip(before, during, strict=False)),
        "is_dead": is_dead,
        "equal_after": sum(a == b for a, b in zip(before, after, strict=False)),
    }


@check
def unseen_shapes(bench: Bench) -> dict[str, Any]:
    """F21: lengths from one token to the longest, at random: nothing compiles while serving."""
    llm = bench.build(token_buckets=[128, 2048])
    draw = random.Random(10).randrange
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    generate(llm, bench.prompts(11, 8), max_tokens=8)
    compiled.clear()
    times: dict[str, list[float]] = {}
    for number in range(200):
        ids = [draw(3, bench.vocab_size) for _ in range(draw(1, MAX_MODEL_LEN - 65))]
        add(llm, [ids], greedy(draw(1, 65)))
        for _ in range(draw(4)):
            _note_times(llm, times)
        if number % 50 == 49:
            while llm.engine.has_unfinished:
                _note_times(llm, times)
    while llm.engine.has_unfinished:
        _note_times(llm, times)
    gaps = sorted(b - a for of in times.values() for a, b in zip(of, of[1:], strict=False))
    return {
        "requests": len(times),
        "compilations": len(compiled),
        "gap_p50_ms": round(statistics.median(gaps) * 1e3, 2),
        "gap_p999_ms": round(gaps[int(len(gaps) * 0.999)] * 1e3, 2),
    }


def _note_times(llm: LLM, times: dict[str, list[float]]) -> None:
    for update in llm.engine.step():
        if update.new_token_ids:
            times.setdefault(update.request_id, []).append(time.perf_counter())


@check
def plan(bench: Bench) -> dict[str, Any]:
    """`jaxserve plan` in a process of its own beside a real start: within 3 %."""
    flags = [
        "--load-format=dummy",
        "--skip-tokenizer-init",
        "--dtype=bfloat16",
        f"--max-model-len={MAX_MODEL_LEN}",
        "--max-num-seqs=64",
        "--max-num-batched-tokens=2048",
        "--gpu-memory-utilization=0.5",
    ]
    command = [sys.executable, "-m", "server.cli.main", "plan", bench.model, *flags, "--json"]
    environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}
    answers = {}
    for name, more in {"here": [], "absent": ["--device-memory=139.8GiB"]}.items():
        done = subprocess.run([*command, *more], env=environment, capture_output=True, text=True)
        answers[name] = json.loads(done.stdout) if done.returncode == 0 else done.stderr[-500:]
    code = (
        "import json,sys; sys.path.insert(0, '.');from jaxserve import LLM;"
        f"llm = LLM({bench.model!r}, load_format='dummy', skip_tokenizer_init=True,"
        f"dtype='bfloat16', max_model_len={MAX_MODEL_LEN}, max_num_seqs=64,"
        "max_num_batched_tokens=2048, gpu_memory_utilization=0.5);"
        "print('PAGES', llm.engine.scheduler.page_pools[0].num_usable)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    answers["start"] = done.stdout.strip() or done.stderr[-500:]
    return answers


def main() -> None:
    """Run the named checks, or all."""
    words = [word for word in sys.argv[1:] if "=" not in word]
    flags = {k: json.loads(v) for k, v in (w.split("=", 1) for w in sys.argv[1:] if "=" in w)}
    model, *names = words
    bench = Bench(model, flags)
    for name in names or CHECKS:
        try:
            result, seconds = timed(lambda name=name: CHECKS[name](bench))
        except Exception as error:  # one check that fails shall not hide the others
            result, seconds = {"error": repr(error)[:600]}, 0.0
        print(json.dumps({"check": name, "took": round(seconds, 1)} | result), flush=True)


if __name__ == "__main__":
    main()
