"""Time many users with one system prompt: without the prefix cache, with it cold, and warm.

    python benchmarks/shared_prefix.py MODEL [USERS PREFIX_TOKENS OWN_TOKENS] [FLAG=VALUE ...]

All users come at once. Random weights and token ids. For each run one JSON line: time to the first
token (mean, median, last), tokens computed, and the share of the allocated token slots that stood
empty, in the mean over the steps. Then a chat of 20 turns: what each computes of what it is given.
A FLAG is an engine argument.
"""

import json
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxserve import LLM, SamplingParams
from jaxserve.sampling_params import RequestOutputKind

OUTPUT_TOKENS, TURNS = 16, 20
STAGES = ("schedule", "build", "dispatch", "collect", "commit")
RUNS = (("no cache", False), ("cold", True), ("warm", True), ("warm again", True))


def build(model: str, flags: dict[str, Any]) -> LLM:
    """An LLM with random weights."""
    settings = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "max_num_seqs": 64,
        "row_buckets": [8, 64],
        "token_buckets": [128, 2048, 4096, 8192],
        "max_num_batched_tokens": 8192,
    }
    return LLM(model, **settings | flags)


def run(llm: LLM, prompts: list[list[int]], *, reads_cache: bool) -> dict[str, Any]:
    """One call with all prompts: times to the first tokens, and what was computed."""
    params = SamplingParams(
        temperature=0,
        max_tokens=OUTPUT_TOKENS,
        ignore_eos=True,
        detokenize=False,
        skip_reading_prefix_cache=not reads_cache,
    )
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    kind = RequestOutputKind.FINAL_ONLY
    for request, _ in llm.request_maker.of_prompts(inputs, params, kind):
        llm.engine.add(request)
    before, start, first = replace(llm.engine.times), time.perf_counter(), {}
    empty, until_first = [], before
    while llm.engine.has_unfinished:
        for update in llm.engine.step():
            if update.new_token_ids:
                first.setdefault(update.request_id, time.perf_counter() - start)
        if len(first) == len(prompts) and until_first is before:
            until_first = replace(llm.engine.times)
        empty.append(llm.engine.scheduler.unused_slot_share)
    times = sorted(first.values())
    return {
        "ttft_mean_ms": round(statistics.mean(times) * 1e3, 1),
        "ttft_median_ms": round(statistics.median(times) * 1e3, 1),
        "ttft_last_ms": round(times[-1] * 1e3, 1),
        "ms_until_all_have_one": {
            stage: round((getattr(until_first, stage) - getattr(before, stage)) * 1e3, 1)
            for stage in STAGES
        },
        "steps": until_first.num_steps - before.num_steps,
        "computed_tokens": llm.engine.times.num_tokens - before.num_tokens,
        "unused_slot_share": round(statistics.mean(empty), 4),
    }


def main() -> None:
    """Run and print."""
    words = [word for word in sys.argv[1:] if "=" not in word]
    flags = {k: json.loads(v) for k, v in (w.split("=", 1) for w in sys.argv[1:] if "=" in w)}
    model, *sizes = words
    num_users, num_prefix, num_own = map(int, sizes or (64, 2000, 50))
    llm = build(model, flags)
    draw = random.Random(0).randrange

    def ids(count: int) -> list[int]:
        return [draw(1000, 30000) for _ in range(count)]

    def users() -> list[list[int]]:
        prefix = ids(num_prefix)
        return [prefix + ids(num_own) for _ in range(num_users)]

    prompts = users()
    run(llm, prompts, reads_cache=False)  # warms up
    for name, reads_cache in RUNS:
        prompts = (
            users() if "warm" not in name else [p[:num_prefix] + ids(num_own) for p in prompts]
        )
        result = run(llm, prompts, reads_cache=reads_cache)
        print(json.dumps({"run": name, "users": num_users, "prefix": num_prefix} | result))
    chat, turns = ids(num_prefix), []
    for _ in range(TURNS):
        chat += ids(num_own)
        turns.append(int(run(llm, [chat], reads_cache=True)["computed_tokens"]))
        chat += ids(OUTPUT_TOKENS)
    print(json.dumps({"run": "chat", "computed_tokens": turns, "given": num_own + OUTPUT_TOKENS}))


if __name__ == "__main__":
    main()
