"""The benchmark's workloads: prompts as token ids, drawn with fixed seeds."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

from jaxserve.sampling_params import SamplingParams

LOWEST_ID, IDS_LEFT_OUT_AT_END = 1000, 2000
"""Prompt ids are drawn between these borders, away from control tokens."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One test.

    Attributes:
      name: of the test.
      kind: "latency" reports times of first and later tokens, "throughput" tokens a second.
      prompts: token ids.
      output_lens: tokens to generate, for each prompt.
      num_warm_up: requests of the warm-up call.
      temperature: 0 = greedy.
      top_p: 1 = off.
    """

    name: str
    kind: Literal["latency", "throughput"]
    prompts: tuple[tuple[int, ...], ...]
    output_lens: tuple[int, ...]
    num_warm_up: int
    temperature: float = 0.0
    top_p: float = 1.0

    def sampling_params(self, output_len: int, *, detokenize: bool) -> SamplingParams:
        """Parameters that generate exactly so many tokens."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=output_len,
            ignore_eos=True,
            detokenize=detokenize,
        )


def _draw(rng: Random, vocab_size: int, length: int) -> tuple[int, ...]:
    low, high = LOWEST_ID, vocab_size - IDS_LEFT_OUT_AT_END
    if low >= high:
        low, high = 0, vocab_size
    return tuple(rng.randrange(low, high) for _ in range(length))


def _equal(name: str, kind, seed: int, count: int, in_len: int, out_len: int, **options):
    def make(vocab_size: int) -> Workload:
        rng = Random(seed)
        prompts = tuple(_draw(rng, vocab_size, in_len) for _ in range(count))
        return Workload(name, kind, prompts, (out_len,) * count, count, **options)

    return make


def mixed_lengths(count: int) -> list[tuple[int, int]]:
    """(input, output) lengths of mixed1000: uniform 32..1024 and 16..512, seed 0."""
    rng = Random(0)
    return [(rng.randint(32, 1024), rng.randint(16, 512)) for _ in range(count)]


def _mixed(vocab_size: int) -> Workload:
    lengths, rng = mixed_lengths(1000), Random(13)
    prompts = tuple(_draw(rng, vocab_size, num_in) for num_in, _ in lengths)
    output_lens = tuple(num_out for _, num_out in lengths)
    return Workload("mixed1000", "throughput", prompts, output_lens, 300)


WORKLOADS: dict[str, Callable[[int], Workload]] = {
    "single": _equal("single", "latency", 11, 1, 128, 256),
    "decode64": _equal("decode64", "latency", 14, 64, 128, 256),
    "batch256": _equal("batch256", "throughput", 12, 256, 512, 128),
    "batch256_sampled": _equal(
        "batch256_sampled", "throughput", 12, 256, 512, 128, temperature=0.8, top_p=0.95
    ),
    "mixed1000": _mixed,
}
"""Name -> workload of a vocabulary size."""

LATENCY = ("single", "decode64")
THROUGHPUT = ("batch256", "batch256_sampled", "mixed1000")
