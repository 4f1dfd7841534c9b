"""Profile decode steps of the engine and print the device's kernels: count and microseconds.

    python benchmarks/profile_step.py MODEL_FOLDER ROWS CONTEXT [ENGINE_ARGUMENT=VALUE ...]

Random weights; the steps are those of `LLM.generate` with all rows at the given context.
"""

import collections
import glob
import json
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax

from jaxserve import LLM, SamplingParams

NUM_STEPS = 20


def collect_kernels(folder: str) -> dict[str, list[float]]:
    """Kernel name without numbers -> durations in microseconds, of the GPU's streams."""
    paths = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    kernels = collections.defaultdict(list)
    for plane in jax.profiler.ProfileData.from_file(paths[0]).planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                kernels[re.sub(r"[._]?\d+", "", event.name)].append(event.duration_ns / 1e3)
    return kernels


def main() -> None:
    """Run, trace, and print a table."""
    folder, rows, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    settings = {k: json.loads(v) for k, v in (word.split("=", 1) for word in sys.argv[4:])}
    llm = LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=max(4096, context + 512),
        max_num_seqs=rows,
        row_buckets=[rows],
        token_buckets=[8192],
        max_num_batched_tokens=8192,
        **settings,
    )
    prompts = [{"prompt_token_ids": [1000 + i] * context} for i in range(rows)]
    params = SamplingParams(temperature=0, max_tokens=NUM_STEPS, ignore_eos=True, detokenize=False)
    llm.generate(prompts, params, use_tqdm=False)
    with tempfile.TemporaryDirectory() as trace:
        with jax.profiler.trace(trace):
            llm.generate(prompts, params, use_tqdm=False)
        kernels = collect_kernels(trace)
    ordered = sorted(kernels.items(), key=lambda item: -sum(item[1]))
    print(f"{rows} rows, context {context}, {NUM_STEPS - 1} decode steps and the prefill")
    for name, durations in ordered[:40]:
        durations.sort()
        median = durations[len(durations) // 2]
        print(f"{sum(durations):10.0f} us {len(durations):6} x {median:8.1f} us  {name[:90]}")


if __name__ == "__main__":
    main()
