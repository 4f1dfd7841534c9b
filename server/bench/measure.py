"""Timing of one workload through LLM.generate, by the wall clock."""

import dataclasses
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from jaxserve import __version__
from jaxserve.llm import LLM
from server.bench.workloads import Workload

NUM_FIRST_TOKEN_RUNS = 5
_HOST_STAGES = ("schedule", "build", "dispatch", "collect", "commit")


@dataclasses.dataclass(frozen=True)
class Runner:
    """Runs a workload's prompts.

    Attributes:
      llm: the engine's door.
      with_text: prompts go in as text, and text comes out.
    """

    llm: LLM
    with_text: bool = False

    def prompts(self, workload: Workload, count: int | None = None) -> list[Any]:
        """The first `count` prompts, as `generate` takes them."""
        prompts = workload.prompts[:count]
        if not self.with_text:
            return [{"prompt_token_ids": list(ids)} for ids in prompts]
        tokenizer = self.llm.get_tokenizer()
        return [tokenizer.decode(list(ids)) for ids in prompts]

    def run(
        self, workload: Workload, prompts: list[Any], max_tokens: int | None = None
    ) -> tuple[float, int]:
        """Seconds of one call, and prompt tokens; `max_tokens` replaces the output lengths."""
        lens = workload.output_lens[: len(prompts)]
        params = [
            workload.sampling_params(max_tokens or n, detokenize=self.with_text) for n in lens
        ]
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        for output, p in zip(outputs, params, strict=True):
            if len(output.outputs[0].token_ids) != p.max_tokens:
                raise RuntimeError(f"a request must end at its length; got {output}")
        return seconds, sum(len(output.prompt_token_ids or ()) for output in outputs)


def measure(llm: LLM, workload: Workload, *, num_runs: int, with_text: bool) -> dict[str, Any]:
    """Warm up, run, and describe one workload as a JSON line's content."""
    runner = Runner(llm, with_text)
    prompts = runner.prompts(workload)
    runner.run(workload, prompts[: workload.num_warm_up])
    before, output_before = dataclasses.replace(llm.engine.times), llm.output_seconds
    uploaded = llm.engine.runner.num_uploaded_bytes
    runs = [runner.run(workload, prompts) for _ in range(num_runs)]
    seconds, num_in = [run[0] for run in runs], runs[0][1]
    host = _host_times(before, llm.engine.times)
    num_steps = max(host["num_steps"], 1)
    host["host_ms_output"] = round((llm.output_seconds - output_before) / num_steps * 1e3, 4)
    host["uploaded_bytes_per_step"] = round(
        (llm.engine.runner.num_uploaded_bytes - uploaded) / num_steps
    )
    result: dict[str, Any] = {"test": workload.name, "text": with_text, "runs": num_runs}
    result |= _describe_engine(llm)
    result |= _count_tokens(workload, num_in, statistics.median(seconds))
    result |= {"seconds": [round(s, 4) for s in seconds]}
    if workload.kind == "latency":
        result |= _latency(runner, workload, prompts, statistics.median(seconds))
    return result | host


def _latency(
    runner: Runner, workload: Workload, prompts: list[Any], total_seconds: float
) -> dict[str, Any]:
    """Time to first token, and milliseconds of each later token (of a step, with many rows)."""
    first = [runner.run(workload, prompts, max_tokens=1)[0] for _ in range(NUM_FIRST_TOKEN_RUNS)]
    first_seconds = statistics.median(first)
    later_tokens = max(workload.output_lens) - 1
    return {
        "ttft_ms": round(first_seconds * 1e3, 2),
        "ms_per_step": round((total_seconds - first_seconds) / later_tokens * 1e3, 3),
    }


def _count_tokens(workload: Workload, num_in: int, seconds: float) -> dict[str, Any]:
    num_out = sum(workload.output_lens)
    return {
        "requests": len(workload.prompts),
        "input_tokens": num_in,
        "output_tokens": num_out,
        "output_tokens_per_second": round(num_out / seconds, 1),
        "total_tokens_per_second": round((num_in + num_out) / seconds, 1),
    }


def _host_times(before: Any, after: Any) -> dict[str, Any]:
    """Host milliseconds a step by stage, and padded / real tokens."""
    num_steps = after.num_steps - before.num_steps
    num_tokens = after.num_tokens - before.num_tokens
    padded = after.num_padded_tokens - before.num_padded_tokens
    stages = {
        f"host_ms_{stage}": round(
            (getattr(after, stage) - getattr(before, stage)) / max(num_steps, 1) * 1e3, 4
        )
        for stage in _HOST_STAGES
    }
    return {
        "num_steps": num_steps,
        "padded_per_real_token": round(padded / max(num_tokens, 1), 4),
        **stages,
    }


def _describe_engine(llm: LLM) -> dict[str, Any]:
    built, config = llm.built, llm.model_config
    return {
        "architecture": config.architecture,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "device": llm.device_name,
        "version": __version__,
        "commit": find_commit(),
        "kv_cache_tokens": built.bill.num_tokens,
        "start_seconds": {stage: round(s, 2) for stage, s in built.seconds.items()},
    }


def find_commit() -> str | None:
    """The commit of the source tree that runs, or None when it runs from elsewhere."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
