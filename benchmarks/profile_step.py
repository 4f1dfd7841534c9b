"""Profile steps of the engine: the device's kernels, their count and microseconds a step.

    python benchmarks/profile_step.py MODEL PHASE:ROWS:TOKENS [...] [FLAG=VALUE ...]

PHASE `decode` traces steady decode steps of ROWS rows at a context of TOKENS; `prompt` traces the
steps that compute ROWS prompts of TOKENS each. Random weights. A FLAG is an engine argument
(`num_layers=4` cuts the model short; `timeline=1` prints every kernel of the last step, too;
`host=1` prints what the host does in a step, by the names of its events; `fused_rows=8` and
`fused_mib=1024` say up to how many rows and MiB of a weight a product begins with the norm or the
gate before it, in place of `models/few_rows.py`).

While it is profiled, XLA runs kernels one by one, unless XLA_FLAGS holds
`--xla_enable_command_buffers_during_profiling=true`.
"""

import collections
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax

from jaxserve import LLM, SamplingParams
from jaxserve.sampling_params import RequestOutputKind
from models import few_rows

NUM_STEPS = 16
WARM_UP_STEPS = 8


Events = list[tuple[float, float, str]]
"""(start, duration, name), in microseconds, by start."""


def trace_events(run) -> tuple[Events, Events]:
    """What the device and what the host does while `run` runs."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (path,) = Path(folder).glob("**/*.xplane.pb")
        planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
        return (
            _events_of(planes, "GPU", lambda name: name.startswith("Stream")),
            _events_of(planes, "CPU", lambda _: True),
        )


def _events_of(planes: list, word: str, wants_line: Callable[[str], bool]) -> Events:
    return sorted(
        (event.start_ns / 1e3, event.duration_ns / 1e3, event.name)
        for plane in planes
        if word in plane.name
        for line in plane.lines
        if wants_line(line.name)
        for event in line.events
    )


def build(model: str, rows: list[int], flags: dict[str, Any]) -> LLM:
    """An LLM with few programs."""
    num_layers = flags.pop("num_layers", None)
    few_rows.MAX_FUSED_ROWS = flags.pop("fused_rows", few_rows.MAX_FUSED_ROWS)
    few_rows.MAX_FUSED_BYTES = flags.pop("fused_mib", few_rows.MAX_FUSED_BYTES >> 20) << 20
    settings = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "max_num_seqs": max(rows),
        "row_buckets": rows,
        "token_buckets": [8192],
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,  # the prompts are run several times
        "num_scheduler_steps": 1,  # so that a step is one step
        "compilation_cache_dir": tempfile.mkdtemp(),  # kept programs know nothing of fused_rows
    }
    if num_layers is not None:
        settings["hf_overrides"] = {"num_hidden_layers": num_layers}
    return LLM(model, **settings | flags)


def add_requests(llm: LLM, rows: int, tokens: int, max_tokens: int) -> None:
    """Queue random prompts."""
    draw = random.Random(0).randrange
    prompts = [
        {"prompt_token_ids": [draw(1000, 30000) for _ in range(tokens)]} for _ in range(rows)
    ]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    for request, _ in llm.request_maker.of_prompts(prompts, params, RequestOutputKind.FINAL_ONLY):
        llm.engine.add(request)


def run_to_end(llm: LLM) -> None:
    """Step until nothing is left."""
    while llm.engine.has_unfinished:
        llm.engine.step()


def profile_decode(llm: LLM, rows: int, tokens: int) -> tuple[tuple[Events, Events], int, float]:
    """Events of NUM_STEPS steady steps, their number, and milliseconds a step without a trace."""
    num_prompt_steps = -(-rows * tokens // 8192) + rows // 32 + 2
    add_requests(llm, rows, tokens, max_tokens=num_prompt_steps + 2 * NUM_STEPS + WARM_UP_STEPS)

    def step(count: int) -> None:
        for _ in range(count):
            llm.engine.step()

    step(num_prompt_steps + WARM_UP_STEPS)
    start = time.perf_counter()
    step(NUM_STEPS)
    milliseconds = (time.perf_counter() - start) / NUM_STEPS * 1e3
    events = trace_events(lambda: step(NUM_STEPS))
    run_to_end(llm)
    return events, NUM_STEPS, milliseconds


def profile_prompts(llm: LLM, rows: int, tokens: int) -> tuple[tuple[Events, Events], int, float]:
    """Events of all steps of the prompts, their number, and milliseconds a step."""
    add_requests(llm, rows, tokens, max_tokens=1)
    run_to_end(llm)  # warms up
    add_requests(llm, rows, tokens, max_tokens=1)
    before, start = llm.engine.times.num_steps, time.perf_counter()
    run_to_end(llm)
    milliseconds = (time.perf_counter() - start) * 1e3
    num_steps = llm.engine.times.num_steps - before
    add_requests(llm, rows, tokens, max_tokens=1)
    return trace_events(lambda: run_to_end(llm)), num_steps, milliseconds / num_steps


def print_table(events: Events, num_steps: int) -> None:
    """Sum up events by name, the largest sums first."""
    durations = collections.defaultdict(list)
    for _, duration, name in events:
        durations[re.sub(r"_\d+$", "", name)].append(duration)
    for name, all_of_it in sorted(durations.items(), key=lambda item: -sum(item[1]))[:40]:
        each = sum(all_of_it) / num_steps
        count, median = len(all_of_it) / num_steps, statistics.median(all_of_it)
        print(f"{each:10.1f} us {count:6.1f} x {median:8.1f} us  {name[:90]}")


def main() -> None:
    """Run, trace, and print tables."""
    model, *words = sys.argv[1:]
    flags = {k: json.loads(v) for k, v in (word.split("=", 1) for word in words if "=" in word)}
    phases = [(phase, int(rows), int(tokens)) for phase, rows, tokens in
              (word.split(":") for word in words if "=" not in word)]  # fmt: skip
    with_timeline, with_host = flags.pop("timeline", 0), flags.pop("host", 0)
    llm = build(model, sorted({rows for _, rows, _ in phases}), flags)
    for phase, rows, tokens in phases:
        profile = {"decode": profile_decode, "prompt": profile_prompts}[phase]
        (kernels, host), num_steps, milliseconds = profile(llm, rows, tokens)
        total = sum(duration for _, duration, _ in kernels) / num_steps
        print(
            f"{phase} {rows} x {tokens}: {milliseconds:.3f} ms a step; in the trace of "
            f"{num_steps} steps {total:.0f} us of {len(kernels) / num_steps:.0f} kernels a step"
        )
        print_table(kernels, num_steps)
        if with_host:
            print("the host:")
            print_table(host, num_steps)
        if with_timeline:
            for _, duration, name in kernels[-(len(kernels) // num_steps) :]:
                print(f"    {duration:8.1f} us  {name[:90]}")


if __name__ == "__main__":
    main()
