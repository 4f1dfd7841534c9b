"""Engines, prompts and answers for `check_memory.py`."""

import gc
import json
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxserve import LLM, SamplingParams
from jaxserve.sampling_params import RequestOutputKind

OUTPUT_TOKENS = 64
MAX_MODEL_LEN = 2048

Prompts = list[list[int]]


class Bench:
    """Builds engines of one model, one at a time."""

    def __init__(self, model: str, flags: dict[str, Any]):
        self.model = model
        config = json.loads((Path(model) / "config.json").read_text())
        self.vocab_size = config["vocab_size"]
        num_layers = flags.pop("num_layers", None)
        overrides = {"hf_overrides": {"num_hidden_layers": num_layers}} if num_layers else {}
        self.settings = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 64,
            "row_buckets": [64],
            "token_buckets": [2048],
            "max_num_batched_tokens": 2048,
            "num_gpu_blocks_override": 4096,
        }
        self.settings |= overrides | flags
        self._expected: dict[str, list[tuple[list[int], list[float]]]] = {}

    def build(self, **flags: Any) -> LLM:
        """A new engine; who had one before has dropped it."""
        gc.collect()
        return LLM(self.model, **self.settings | flags)

    def prompts(
        self, seed: int, count: int = 48, shortest: int = 150, longest: int = 400
    ) -> Prompts:
        """Random token ids; the last one of the vocabulary is left out."""
        draw = random.Random(seed).randrange
        return [
            [draw(3, self.vocab_size - 1) for _ in range(draw(shortest, longest))]
            for _ in range(count)
        ]

    def expected(self, prompts: Prompts) -> list[tuple[list[int], list[float]]]:
        """Tokens of an engine whose memory suffices, and by how much each was ahead, in nat."""
        key = json.dumps(prompts)
        if key not in self._expected:
            llm = self.build(enable_prefix_caching=False)
            self._expected[key] = generate(llm, prompts, logprobs=2)
        return self._expected[key]

    def compare(self, prompts: Prompts, got: Iterable[list[int]]) -> dict[str, Any]:
        """How many answers equal the expected ones, and the margin at each first difference."""
        gaps = []
        answers = list(got)
        for (tokens, margins), answer in zip(self.expected(prompts), answers, strict=True):
            pairs = enumerate(zip(tokens, answer, strict=True))
            first = next((index for index, (a, b) in pairs if a != b), None)
            if first is not None:
                gaps.append(round(margins[first], 4))
        return {"answers": len(answers), "equal": len(answers) - len(gaps), "gaps": gaps}


def generate(
    llm: LLM, prompts: Prompts, *, max_tokens: int = OUTPUT_TOKENS, logprobs: int | None = None
) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens of each prompt, and by how much each was ahead if log-probabilities are."""
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=logprobs
    )
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    answers = []
    for output in llm.generate(inputs, params, use_tqdm=False):
        completion = output.outputs[0]
        margins = []
        for of_token in completion.logprobs or ():
            best, second = sorted((entry.logprob for entry in of_token.values()), reverse=True)[:2]
            margins.append(best - second)
        answers.append((list(completion.token_ids), margins))
    return answers


def greedy(max_tokens: int) -> SamplingParams:
    """So many tokens, the most likely ones."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def add(llm: LLM, prompts: Prompts, params: SamplingParams) -> list[str]:
    """Give requests to the engine itself; their ids."""
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    made = llm.request_maker.of_prompts(inputs, params, RequestOutputKind.FINAL_ONLY)
    for request, _ in made:
        llm.engine.add(request)
    return [request.request_id for request, _ in made]


def tokens_of(llm: LLM, prompts: Prompts) -> list[list[int]]:
    """Greedy tokens alone."""
    return [tokens for tokens, _ in generate(llm, prompts)]


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """Result and seconds."""
    start = time.perf_counter()
    return function(), time.perf_counter() - start
