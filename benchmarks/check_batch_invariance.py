"""Check on a Hopper GPU that tokens and log-probabilities do not depend on who shares the batch.

    python benchmarks/check_batch_invariance.py [MODEL] [--layers 8] [--modes invariant,default]
        [--parts tokens,speed] [--prompts 12] [--tokens 32]

Random weights. In each mode every prompt first runs alone; then come the same prompts together,
in reverse, among many others, in other chunks, out of the prefix cache, and preempted. One JSON
line a comparison: how many tokens differ, and by how many nat the reference's token was ahead
where the first one differs. The exit code is 1 if anything differs in the batch-invariant mode.
The default mode promises nothing: there the margins are the finding. Then the times of both.
"""

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxserve import LLM, SamplingParams

HERE = Path(__file__).resolve().parent
SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "row_buckets": [8, 64, 256],
    "token_buckets": [512, 8192],
    "num_gpu_blocks_override": 6144,
}
SMALL_POOL = 260  # pages: too few for all prompts at the same time
CHUNK = 100  # prompt tokens of a sequence in a step
NUM_OTHERS = 180
DECODE_ROWS, DECODE_STEPS, PROMPT_TOKENS = (1, 64, 256), 64, 8192


class Answer(NamedTuple):
    """One request's tokens, and what it was told of their log-probabilities."""

    tokens: list[int]
    logprobs: list[dict[int, float]]  # empty if none were asked for


Answers = dict[str, list[Answer]]
"""By kind: "greedy", "seeded" and "scored", which is greedy with log-probabilities."""


class Checker:
    """Builds engines of one model, and compares what they give."""

    def __init__(self, arguments: argparse.Namespace):
        self.model, self.num_tokens = arguments.model, arguments.tokens
        config = json.loads((Path(self.model) / "config.json").read_text())
        self.vocab_size = config["vocab_size"]
        layers = min(arguments.layers, config["num_hidden_layers"])
        self.settings = SETTINGS | {"hf_overrides": {"num_hidden_layers": layers}}
        self.prompts = self.draw(1, arguments.prompts, 3, 1000)

    def draw(self, seed: int, count: int, shortest: int, longest: int) -> list[list[int]]:
        """Random prompts."""
        rng = random.Random(seed)
        return [
            [rng.randrange(3, self.vocab_size - 1) for _ in range(rng.randint(shortest, longest))]
            for _ in range(count)
        ]

    def build(self, mode: str, **flags: Any) -> LLM:
        """A new engine; who had one before has dropped it."""
        gc.collect()
        flags = self.settings | flags
        return LLM(self.model, **flags, batch_invariant=mode == "invariant")

    def params(self, kind: str, seed: int) -> SamplingParams:
        """Of one request."""
        options: dict[str, Any] = {"temperature": 0}
        if kind == "seeded":
            options = {"temperature": 0.8, "top_p": 0.95, "top_k": 50 * (seed % 2), "seed": seed}
        if kind == "scored":
            options["logprobs"] = 5
        return SamplingParams(
            **options, max_tokens=self.num_tokens, ignore_eos=True, detokenize=False
        )

    def answer(self, llm: LLM, order: list[int], *, num_others: int = 0) -> Answers:
        """Run the prompts of `order` together, and so many others; answers by number."""
        others = self.draw(7, num_others, 3, 300)
        prompts = [{"prompt_token_ids": self.prompts[i]} for i in order]
        prompts += [{"prompt_token_ids": ids} for ids in others]
        answers: Answers = {}
        for kind in ("greedy", "seeded", "scored"):
            params = [self.params(kind, i) for i in order]
            params += [self.params("seeded", 1000 + i) for i in range(num_others)]
            outputs = llm.generate(prompts, params, use_tqdm=False)[: len(order)]
            found = {i: read(output) for i, output in zip(order, outputs, strict=True)}
            answers[kind] = [found[i] for i in sorted(found)]
        return answers

    def alone(self, llm: LLM) -> Answers:
        """Every prompt by itself, with a prefix cache that holds nothing of it."""
        answers: Answers = {}
        for number in range(len(self.prompts)):
            for kind, (answer,) in self.answer(llm, [number]).items():
                answers.setdefault(kind, []).append(answer)
        return answers

    def token_lines(self, mode: str) -> Iterator[dict[str, Any]]:
        """All comparisons of one mode."""
        everyone = list(range(len(self.prompts)))
        llm = self.build(mode, enable_prefix_caching=False)
        want = self.alone(llm)
        plain = [answer._replace(logprobs=[]) for answer in want["scored"]]
        yield compare("alone: decode buckets with mixed ones", want, want | {"greedy": plain})
        yield compare("together", want, self.answer(llm, everyone))
        yield compare("reversed", want, self.answer(llm, everyone[::-1]))
        got = self.answer(llm, everyone, num_others=NUM_OTHERS)
        yield compare(f"with {NUM_OTHERS} others", want, got)
        del llm
        llm = self.build(mode, enable_prefix_caching=False, long_prefill_token_threshold=CHUNK)
        yield compare(f"chunks of {CHUNK}", want, self.answer(llm, everyone))
        del llm
        llm = self.build(mode)
        self.answer(llm, everyone)
        longest = {"prompt_token_ids": max(self.prompts, key=len)}
        (found,) = llm.generate(longest, self.params("greedy", 0), use_tqdm=False)
        line = compare("out of the prefix cache", want, self.answer(llm, everyone[::-1]))
        line["ok"] &= bool(found.num_cached_tokens)
        yield line | {"cached_tokens_of_the_longest": found.num_cached_tokens}
        del llm
        llm = self.build(mode, num_gpu_blocks_override=SMALL_POOL, long_prefill_token_threshold=256)
        line = compare("preempted", want, self.answer(llm, everyone, num_others=20))
        preemptions = llm.engine.scheduler.num_preemptions
        line["ok"] &= preemptions > 0
        yield line | {"preemptions": preemptions}

    def speed_line(self, mode: str) -> dict[str, Any]:
        """Milliseconds of decode steps and of a step of prompt tokens."""
        llm = self.build(mode, enable_prefix_caching=False)
        line: dict[str, Any] = {"check": "speed"}
        for rows in DECODE_ROWS:
            prompts = self.draw(rows, rows, 200, 200)
            self.seconds(llm, prompts, DECODE_STEPS + 1)
            spans = [self.seconds(llm, prompts, n) for n in (DECODE_STEPS + 1, 1) * 2]
            taken = min(spans[::2]) - min(spans[1::2])
            line[f"ms_of_a_step_of_{rows}_rows"] = round(taken / DECODE_STEPS * 1e3, 3)
        prompts = self.draw(5, 8, PROMPT_TOKENS // 8, PROMPT_TOKENS // 8)
        taken = min(self.seconds(llm, prompts, 1) for _ in range(4))
        line[f"ms_of_{PROMPT_TOKENS}_prompt_tokens"] = round(taken * 1e3, 3)
        return line | {"prompt_tokens_a_second": round(PROMPT_TOKENS / taken)}

    def seconds(self, llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
        """Of greedy answers of so many tokens."""
        params = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        start = time.perf_counter()
        llm.generate(inputs, params, use_tqdm=False)
        return time.perf_counter() - start


def read(output: Any) -> Answer:
    """The answer of a finished output."""
    completion = output.outputs[0]
    logprobs = [
        {token: entry.logprob for token, entry in of_token.items()}
        for of_token in completion.logprobs or ()
    ]
    return Answer(list(completion.token_ids), logprobs)


def compare(check: str, want: Answers, got: Answers) -> dict[str, Any]:
    """Tokens of all kinds, and log-probabilities as far as the tokens are equal, bit for bit."""
    line: dict[str, Any] = {"check": check, "tokens": 0, "differing_tokens": 0}
    line |= {"logprobs": 0, "differing_logprobs": 0, "largest_logprob_difference": 0.0}
    parted, margins = dict.fromkeys(want, 0), []
    for kind in want:
        for number, (one, other) in enumerate(zip(want[kind], got[kind], strict=True)):
            line["tokens"] += len(one.tokens)
            differs = [a != b for a, b in zip(one.tokens, other.tokens, strict=True)]
            line["differing_tokens"] += sum(differs)
            equal = differs.index(True) if True in differs else len(differs)
            if True in differs:
                parted[kind] += 1
                if kind != "seeded":
                    margins.append(margin(want["scored"][number].logprobs[equal]))
            for a, b in zip(one.logprobs[: equal + 1], other.logprobs[: equal + 1], strict=False):
                line["logprobs"] += len(a)
                line["differing_logprobs"] += sum(a[token] != b.get(token) for token in a)
                gaps = [abs(a[token] - b[token]) for token in a if token in b]
                largest = max([line["largest_logprob_difference"], *gaps])
                line["largest_logprob_difference"] = largest
    line["ok"] = not line["differing_tokens"] and not line["differing_logprobs"]
    return line | {"rows_that_part": parted, "margins_at_the_first": sorted(margins)}


def margin(of_token: dict[int, float]) -> float:
    """By how many nat the best token was ahead."""
    best, second = sorted(of_token.values(), reverse=True)[:2]
    return round(best - second, 5)


def main() -> int:
    """Print the lines; 1 if the batch-invariant mode breaks its promise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", default=str(HERE / "shapes" / "qwen3-0.6b"))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--modes", default="invariant,default")
    parser.add_argument("--parts", default="tokens,speed")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=32)
    arguments = parser.parse_args()
    checker, start, is_good = Checker(arguments), time.monotonic(), True

    def tell(mode: str, line: dict[str, Any]) -> None:
        seconds = round(time.monotonic() - start, 1)
        print(json.dumps({"mode": mode} | line | {"after_seconds": seconds}), flush=True)

    for mode in arguments.modes.split(","):
        if "tokens" in arguments.parts.split(","):
            for line in checker.token_lines(mode):
                is_good &= line["ok"] or mode != "invariant"
                tell(mode, line)
        if "speed" in arguments.parts.split(","):
            tell(mode, checker.speed_line(mode))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
