"""Run the benchmark on both shapes and print our figures beside vLLM's and the GPU's limit.

    python benchmarks/compare.py [--shapes qwen3-0.6b,llama-3-8b] [--out FOLDER] [flags of bench]

Each shape runs in a process of its own, with random weights, as docs/performance.md says.
With --tensor-parallel-size N, N GPUs share each layer; vLLM's figures and the limit are of one GPU,
so that they are left out.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
SHAPES = ("qwen3-0.6b", "llama-3-8b")

# One H200; vLLM 0.26.0, offline LLM, default settings, max_model_len 4096.
VLLM = {
    ("qwen3-0.6b", "single", "ms_per_step"): 2.02,
    ("qwen3-0.6b", "single", "ttft_ms"): 12.4,
    ("qwen3-0.6b", "decode64", "ms_per_step"): 3.1,
    ("qwen3-0.6b", "decode64", "ttft_ms"): 46.7,
    ("qwen3-0.6b", "batch256", "output_tokens_per_second"): 25094,
    ("qwen3-0.6b", "batch256_sampled", "output_tokens_per_second"): 24215,
    ("qwen3-0.6b", "mixed1000", "output_tokens_per_second"): 17863,
    ("llama-3-8b", "single", "ms_per_step"): 4.87,
    ("llama-3-8b", "single", "ttft_ms"): 9.4,
    ("llama-3-8b", "decode64", "ms_per_step"): 6.01,
    ("llama-3-8b", "decode64", "ttft_ms"): 197,
    ("llama-3-8b", "batch256", "output_tokens_per_second"): 6892,
    ("llama-3-8b", "batch256_sampled", "output_tokens_per_second"): 6842,
    ("llama-3-8b", "mixed1000", "output_tokens_per_second"): 9828,
}
LIMIT = {
    ("qwen3-0.6b", "single", "ms_per_step"): 0.28,
    ("qwen3-0.6b", "decode64", "ms_per_step"): 0.71,
    ("qwen3-0.6b", "batch256", "output_tokens_per_second"): 46000,
    ("qwen3-0.6b", "mixed1000", "output_tokens_per_second"): 44100,
    ("llama-3-8b", "single", "ms_per_step"): 3.50,
    ("llama-3-8b", "decode64", "ms_per_step"): 3.99,
    ("llama-3-8b", "batch256", "output_tokens_per_second"): 9270,
    ("llama-3-8b", "mixed1000", "output_tokens_per_second"): 13050,
}


def run_shape(shape: str, flags: list[str], timeout: float) -> list[dict]:
    """The JSON lines of one shape; a failing process leaves those it had printed."""
    command = [sys.executable, "-m", "server.cli.main", "bench", "all"]
    command += ["--model", str(HERE / "shapes" / shape), "--load-format", "dummy"]
    command += ["--skip-tokenizer-init", "--max-model-len", "4096", *flags]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=timeout, cwd=HERE.parent
        )
        text = done.stdout
    except subprocess.TimeoutExpired as expired:
        text = expired.stdout.decode() if isinstance(expired.stdout, bytes) else ""
        print(f"{shape}: not finished after {timeout:.0f} s", flush=True)
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [line | {"shape": shape} for line in lines]


def print_table(results: list[dict], num_gpus: int) -> None:
    """One row a figure: ours, vLLM's, the limit, and how many times vLLM's speed ours is."""
    if num_gpus > 1:
        print(f"{num_gpus} GPUs share each layer")
    print(f"{'test':28} {'figure':26} {'jaxserve':>10} {'vLLM':>9} {'limit':>9} {'speed':>7}")
    for result in results:
        for figure in ("ttft_ms", "ms_per_step", "output_tokens_per_second"):
            key = (result["shape"], result["test"], figure)
            if figure not in result or key not in VLLM:
                continue
            name = f"{result['shape']} {result['test']}"
            if num_gpus > 1:
                print(f"{name:28} {figure:26} {result[figure]:>10}")
                continue
            ours, theirs, limit = result[figure], VLLM[key], LIMIT.get(key, "")
            speed = ours / theirs if figure.endswith("per_second") else theirs / ours
            print(f"{name:28} {figure:26} {ours:>10} {theirs:>9} {limit:>9} {speed:>6.2f}x")


def main() -> None:
    """Run, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--out", help="folder for the JSON lines")
    parser.add_argument("--timeout", type=float, default=1200)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    arguments, flags = parser.parse_known_args()
    num_gpus = arguments.tensor_parallel_size
    flags += ["--tensor-parallel-size", str(num_gpus)]
    results = []
    for shape in arguments.shapes.split(","):
        results += run_shape(shape, flags, arguments.timeout)
    print_table(results, num_gpus)
    if arguments.out:
        path = Path(arguments.out) / f"bench_{time.strftime('%Y%m%d_%H%M%S')}.jsonl"
        path.write_text("".join(json.dumps(result) + "\n" for result in results))


if __name__ == "__main__":
    main()
