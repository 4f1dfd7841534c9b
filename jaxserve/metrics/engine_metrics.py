"""EngineMetrics: an engine's gauges, counters and histograms, under vLLM's Prometheus names."""

import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from jaxserve.async_llm_engine import EngineState
from jaxserve.config import EngineConfig
from jaxserve.distributed.messages import EngineInfo, EngineStats
from jaxserve.metrics.families import FamilyMaker
from jaxserve.metrics.histograms import HISTOGRAMS, Histogram
from jaxserve.metrics.request_counts import RequestCounts
from jaxserve.metrics.totals import STAGES, Totals
from jaxserve.outputs import RequestOutput
from jaxserve.request import Request

logger = logging.getLogger(__name__)

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")
"""The settings that bound what waits; vLLM has the same reasons."""

SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""vLLM's names of the sleep levels 0 to 2."""


class WatchedEngine(Protocol):
    """What is read of an engine when metrics are asked for; AsyncLLMEngine has it."""

    config: EngineConfig
    state: EngineState
    info: EngineInfo | None
    stats: EngineStats

    @property
    def seconds_since_news(self) -> float:
        """Age of the engine's newest message; 0 while it has nothing to do."""
        ...


def _never_raises(method: Callable[..., None]) -> Callable[..., None]:
    """Count what goes wrong in metrics; it is none of the engine's business."""

    @functools.wraps(method)
    def call(self: "EngineMetrics", *arguments: Any) -> None:
        try:
            method(self, *arguments)
        except Exception:
            self._num_errors += 1
            if self._num_errors == 1:
                logger.exception("metrics failed; later failures are only counted")

    return call


class EngineMetrics(Collector):
    """Observes one engine, and shows it in a registry of its own.

    Gauges are read from the engine when they are asked for, so they are never left over. Output
    tokens are counted as the engine's steps give them out, whoever is to see them, and when.
    `vllm:request_success` counts each of a request's `n` sequences under its own reason.

    Args:
      engine: the engine.
      clock: monotonic seconds, the clock of the requests' times.

    Attributes:
      registry: what to expose; other collectors of the process may be added.
    """

    def __init__(self, engine: WatchedEngine, clock: Callable[[], float] = time.monotonic):
        self.registry = CollectorRegistry()
        self._engine, self._num_errors = engine, 0
        self._make = FamilyMaker(model_name(engine.config), "0")
        self._histograms = {name: Histogram(bounds) for name, (bounds, _) in HISTOGRAMS.items()}
        self._totals, self._requests = Totals(), RequestCounts(self._histograms, clock)
        self._num_rejected: dict[str, int] = dict.fromkeys(REJECTION_REASONS, 0)
        self.registry.register(self)

    @property
    def num_errors(self) -> int:
        """Failures inside the metrics, and totals or times that ran backwards."""
        return self._num_errors + self._requests.num_backward_times

    def added(self, request: Request) -> None:
        """Nothing is counted before a request's first output, so a refused one leaves nothing."""

    @_never_raises
    def stepped(self, stats: EngineStats) -> None:
        """Follow the engine's totals."""
        totals = self._totals
        num_steps, num_tokens = totals["num_steps"], totals["num_tokens"]
        self._num_errors += totals.follow(stats)
        if new_steps := int(totals["num_steps"] - num_steps):
            per_step = (totals["num_tokens"] - num_tokens) / new_steps
            self._histograms["vllm:iteration_tokens_total"].observe(per_step, new_steps)

    @_never_raises
    def gave(self, request: Request, output: RequestOutput) -> None:
        """Count an output's tokens and ends, and the time since the one before."""
        self._requests.gave(request, output)

    @_never_raises
    def aborted(self, request: Request) -> None:
        """Count a request whose client has gone."""
        self._requests.aborted(request)

    @_never_raises
    def rejected(self, reason: str) -> None:
        """Count a request that was refused under one of REJECTION_REASONS."""
        self._num_rejected[reason] += 1

    def collect(self) -> Iterator[Metric]:
        """The families of this moment; gauges are 0 while no engine works."""
        yield from self._gauges()
        yield from self._counters()
        for name, (_, text) in HISTOGRAMS.items():
            yield self._make.histogram(name, text, self._histograms[name])
        ttft = self._histograms["vllm:time_to_first_token_seconds"]
        yield self._make.histogram("vllm_ttft_seconds", "Seconds to the first token.", ttft)

    def _gauges(self) -> Iterator[Metric]:
        engine, make = self._engine, self._make
        stats = engine.stats if engine.state is EngineState.READY else EngineStats()
        yield make.gauge("vllm:num_requests_running", "Sequences that run.", stats.num_running)
        yield make.gauge("vllm:num_requests_waiting", "Sequences that wait.", stats.num_waiting)
        yield make.gauges(
            "vllm:num_requests_waiting_by_reason",
            "Sequences that wait for slots and pages, and for anything else.",
            "reason",
            {"capacity": stats.num_waiting, "deferred": 0},
        )
        yield make.gauge(
            "vllm:kv_cache_usage_perc", "Share of the pages in use, 0 to 1.", stats.kv_cache_usage
        )
        is_ready = engine.state is EngineState.READY
        yield make.gauges(
            "vllm:engine_sleep_state",
            "1 for awake, asleep with the weights on the host, or asleep without them.",
            "sleep_state",
            {
                state: is_ready and stats.sleep_level == level
                for level, state in enumerate(SLEEP_STATES)
            },
        )
        if (info := engine.info) is not None:
            facts = {
                "block_size": info.page_size,
                "num_gpu_blocks": sum(info.num_pages),
                "gpu_memory_utilization": engine.config.gpu_memory_utilization,
            }
            yield make.info("vllm:cache_config_info", "Settings of the KV cache.", facts)
        states = {state.value: state is engine.state for state in EngineState}
        yield make.gauges("jaxserve:engine_state", "1 for the engine's state.", "state", states)
        yield make.gauge(
            "jaxserve:seconds_since_engine_news",
            "Seconds without news of an engine that has work.",
            engine.seconds_since_news,
        )

    def _counters(self) -> Iterator[Metric]:
        make, totals = self._make, self._totals
        requests, rejected = self._requests, self._num_rejected
        num_prompt, num_cached = requests.num_prompt_tokens, requests.num_cached_tokens
        for name, text, value in (
            ("vllm:num_preemptions", "Preemptions.", totals["num_preemptions"]),
            ("vllm:prompt_tokens", "Prompt tokens processed.", num_prompt),
            ("vllm:prompt_tokens_cached", "Prompt tokens that needed no computing.", num_cached),
            ("vllm:generation_tokens", "Output tokens generated.", totals["num_generation_tokens"]),
            *self._prefix_counters(),
            ("vllm:corrupted_requests", "Sequences ended by NaN.", requests.num_corrupted),
            ("vllm_requests", "Requests that ended.", requests.num_requests_ended),
            ("jaxserve:step_tokens", "Tokens that steps computed.", totals["num_tokens"]),
            (
                "jaxserve:step_padded_tokens",
                "Tokens of the buckets that steps were padded to.",
                totals["num_padded_tokens"],
            ),
            (
                "jaxserve:compilations",
                "Programs that were compiled in the engine's process while it serves.",
                totals["num_compilations"],
            ),
            ("jaxserve:num_bad_frames", "Frames without a message.", totals["num_bad_frames"]),
            ("jaxserve:metric_errors", "Failures inside the metrics.", self.num_errors),
        ):
            yield make.counter(name, text, value)
        for name, text, label, values in (
            (
                "vllm:prompt_tokens_by_source",
                "Prompt tokens that were computed, and that were found in the prefix cache.",
                "source",
                {"local_compute": num_prompt - num_cached, "local_cache_hit": num_cached},
            ),
            (
                "vllm:request_success",
                "Sequences that ended, by reason.",
                "finished_reason",
                requests.num_ended,
            ),
            (
                "vllm:admission_rejections",
                "Requests refused since too much waits, by the setting that says so.",
                "reason",
                rejected,
            ),
            (
                "jaxserve:host_seconds",
                "The host's seconds by stage of the step; in collect it waits for the device.",
                "stage",
                {stage: totals[f"{stage}_seconds"] for stage in STAGES},
            ),
        ):
            yield make.counters(name, text, label, values)

    def _prefix_counters(self) -> tuple[tuple[str, str, float], ...]:
        """Name, text and value of what the prefix cache, its copies and its host tier count."""
        totals = self._totals
        num_queries, num_host_hits = totals["num_prefix_queries"], totals["num_host_prefix_hits"]
        num_hits = totals["num_prefix_hits"] - num_host_hits  # on the device, as vLLM counts
        return (
            ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", num_queries),
            ("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", num_hits),
            ("vllm:gpu_prefix_cache_queries", "Old name of prefix_cache_queries.", num_queries),
            ("vllm:gpu_prefix_cache_hits", "Old name of prefix_cache_hits.", num_hits),
            (
                "vllm:external_prefix_cache_queries",
                "Tokens looked up in the host's memory, since the device had not computed them.",
                num_queries - num_hits,
            ),
            (
                "vllm:external_prefix_cache_hits",
                "Tokens found in the host's memory.",
                num_host_hits,
            ),
            (
                "jaxserve:copied_pages",
                "Pages copied for sequences that share their first tokens.",
                totals["num_copied_pages"],
            ),
            (
                "jaxserve:offloaded_bytes",
                "Bytes of pages copied to the host's memory.",
                totals["num_offloaded_bytes"],
            ),
            (
                "jaxserve:fetched_bytes",
                "Bytes of pages copied back from the host's memory.",
                totals["num_fetched_bytes"],
            ),
        )


def model_name(config: EngineConfig) -> str:
    """The label of an engine's metrics: its first served name, or what it was loaded from."""
    if config.served_model_name:
        return config.served_model_name[0]
    return config.model or DEFAULT_MODEL_NAME
