"""Traces of requests for the policy simulation: when they come, and how long they are."""

from collections.abc import Callable

import numpy as np

from benchmarks.policy_simulation import TraceRequest

CHAT_TTFT_SECONDS, CHAT_TPOT_SECONDS = 0.5, 0.05
DOCUMENT_TTFT_SECONDS = 15.0
LONGEST_PROMPT, LONGEST_OUTPUT = 30_000, 1024


def steady(num_requests: int, rate: float, seed: int = 0) -> list[TraceRequest]:
    """Poisson arrivals, lognormal lengths; every request is a chat.

    Args:
      num_requests: in all.
      rate: requests a second.
      seed: of the random numbers.
    """
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(1 / rate, num_requests))
    return _make_trace(random, arrivals, np.zeros(num_requests, bool))


def mixed(
    num_requests: int, rate: float, seed: int = 0, document_share: float = 0.15
) -> list[TraceRequest]:
    """Poisson arrivals of chats and documents; prompts of documents have a heavy (Pareto) tail.

    Args:
      num_requests: in all.
      rate: requests a second.
      seed: of the random numbers.
      document_share: how many of them are documents.
    """
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(1 / rate, num_requests))
    return _make_trace(random, arrivals, random.random(num_requests) < document_share)


def bursts(
    num_requests: int, rate: float, seed: int = 0, burst_size: int = 120
) -> list[TraceRequest]:
    """As `mixed`, but a third of all requests come in bursts, each within half a second.

    Args:
      num_requests: in all.
      rate: requests a second, bursts included.
      seed: of the random numbers.
      burst_size: requests of one burst.
    """
    random = np.random.default_rng(seed)
    duration = num_requests / rate
    num_bursts = num_requests // 3 // burst_size
    starts = random.uniform(0, duration, num_bursts).repeat(burst_size)
    in_bursts = starts + random.uniform(0, 0.5, starts.size)
    others = random.uniform(0, duration, num_requests - starts.size)
    arrivals = np.sort(np.concatenate([in_bursts, others]))
    return _make_trace(random, arrivals, random.random(num_requests) < 0.15)


TRACES: dict[str, tuple[Callable[..., list[TraceRequest]], float]] = {
    "steady": (steady, 50.0),
    "mixed": (mixed, 21.0),
    "bursts": (bursts, 16.0),
}
"""Traces by name, each with requests a second that load the device but can be served."""


def _make_trace(
    random: np.random.Generator, arrivals: np.ndarray, is_document: np.ndarray
) -> list[TraceRequest]:
    count = arrivals.size
    chats = random.lognormal(np.log(350), 0.8, count)
    documents = 3000 * (1 + random.pareto(1.3, count))
    prompts = np.where(is_document, documents, chats).clip(1, LONGEST_PROMPT).astype(int)
    outputs = random.lognormal(np.log(120), 0.8, count).clip(1, LONGEST_OUTPUT).astype(int)
    return [
        TraceRequest(
            arrival_seconds=float(arrival),
            num_prompt_tokens=int(prompt),
            num_output_tokens=int(output),
            max_tokens=LONGEST_OUTPUT,
            kind="document" if document else "chat",
            priority=int(document),
            ttft_goal_seconds=DOCUMENT_TTFT_SECONDS if document else CHAT_TTFT_SECONDS,
            tpot_goal_seconds=CHAT_TPOT_SECONDS,
        )
        for arrival, prompt, output, document in zip(
            arrivals, prompts, outputs, is_document, strict=True
        )
    ]
