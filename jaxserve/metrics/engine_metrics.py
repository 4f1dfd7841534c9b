"""EngineMetrics: an engine's gauges, counters and histograms, under vLLM's Prometheus names."""

import functools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from jaxserve.async_llm_engine import EngineState
from jaxserve.config import EngineConfig
from jaxserve.distributed.messages import EngineInfo, EngineStats
from jaxserve.metrics.histograms import HISTOGRAMS, Histogram
from jaxserve.outputs import RequestOutput, RequestStateStats
from jaxserve.request import FinishReason, Request

logger = logging.getLogger(__name__)

LABELS = ("model_name", "engine")
DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"


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


@dataclass(slots=True)
class _Total:
    """A counter that follows a total of the engine, and never falls."""

    value: int = 0
    seen: int = 0

    def follow(self, total: int) -> bool:
        """Take the new total; returns whether it was at least the last one."""
        delta, self.seen = total - self.seen, total
        self.value += max(0, delta)
        return delta >= 0


@dataclass(slots=True)
class _Seen:
    """What was counted of an unfinished request.

    Attributes:
      last_seconds: when its newest token came; None before the first.
      num_tokens: of all its sequences.
      ended: indices of sequences whose ends are counted.
    """

    last_seconds: float | None = None
    num_tokens: int = 0
    ended: set[int] = field(default_factory=set)


def _never_raises(method: Callable[..., None]) -> Callable[..., None]:
    """Count what goes wrong in metrics; it is none of the engine's business."""

    @functools.wraps(method)
    def call(self: "EngineMetrics", *arguments: Any) -> None:
        try:
            method(self, *arguments)
        except Exception:
            self.num_errors += 1
            if self.num_errors == 1:
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
      num_errors: failures inside the metrics, and totals or times that ran backwards.
    """

    def __init__(self, engine: WatchedEngine, clock: Callable[[], float] = time.monotonic):
        self.registry = CollectorRegistry()
        self.num_errors = 0
        self._engine, self._clock = engine, clock
        self._labels = (model_name(engine.config), "0")
        self._histograms = {name: Histogram(bounds) for name, (bounds, _) in HISTOGRAMS.items()}
        self._ttft = self._histograms["vllm:time_to_first_token_seconds"]
        self._token_gaps = self._histograms["vllm:inter_token_latency_seconds"]
        self._preemptions, self._bad_frames = _Total(), _Total()
        self._steps, self._step_tokens, self._generation_tokens = _Total(), _Total(), _Total()
        self._num_prompt_tokens = self._num_requests_ended = 0
        self._num_ended = dict.fromkeys(map(str, FinishReason), 0)
        self._seen: dict[str, _Seen] = {}
        self.registry.register(self)

    def added(self, request: Request) -> None:
        """Nothing is counted before a request's first output, so a refused one leaves nothing."""

    @_never_raises
    def stepped(self, stats: EngineStats) -> None:
        """Follow the engine's totals."""
        num_steps, num_tokens = self._steps.value, self._step_tokens.value
        for total, value in (
            (self._preemptions, stats.num_preemptions),
            (self._bad_frames, stats.num_bad_frames),
            (self._steps, stats.num_steps),
            (self._step_tokens, stats.num_tokens),
            (self._generation_tokens, stats.num_generation_tokens),
        ):
            if not total.follow(value):
                self.num_errors += 1
        if new_steps := self._steps.value - num_steps:
            per_step = (self._step_tokens.value - num_tokens) / new_steps
            self._histograms["vllm:iteration_tokens_total"].observe(per_step, new_steps)

    @_never_raises
    def gave(self, request: Request, output: RequestOutput) -> None:
        """Count an output's ends, and the time since the one before."""
        stats = output.metrics
        if stats is None:
            return
        seen = self._seen.get(output.request_id)
        if seen is None:
            seen = self._seen[output.request_id] = _Seen()
        if stats.last_token_ts is not None:
            num_tokens = stats.num_generation_tokens
            if seen.last_seconds is None:
                self._num_prompt_tokens += len(request.prompt_token_ids)
                self._observe(self._ttft, stats.first_token_latency)
            elif num_new := num_tokens - seen.num_tokens:
                gap = (stats.last_token_ts - seen.last_seconds) * len(output.outputs) / num_new
                self._token_gaps.observe(gap, num_new)
            seen.last_seconds, seen.num_tokens = stats.last_token_ts, num_tokens
        for sequence in output.outputs:
            # Cumulative outputs show a sequence that has ended again and again.
            reason = sequence.finish_reason
            if reason is not None and sequence.index not in seen.ended:
                seen.ended.add(sequence.index)
                self._num_ended[reason] += 1
        if output.finished:
            del self._seen[output.request_id]
            self._num_requests_ended += 1
            self._observe_end(request, stats)

    @_never_raises
    def aborted(self, request: Request) -> None:
        """Count a request whose client has gone, and those of its sequences that had not ended."""
        seen = self._seen.pop(request.request_id, None)
        num_ended = 0 if seen is None else len(seen.ended)
        self._num_ended[FinishReason.ABORT] += request.sampling_params.n - num_ended
        self._num_requests_ended += 1

    def _observe_end(self, request: Request, stats: RequestStateStats) -> None:
        """Observe the times and counts of a finished request."""
        params, num_tokens = request.sampling_params, stats.num_generation_tokens
        scheduled, first, last = stats.scheduled_ts, stats.first_token_ts, stats.last_token_ts
        decode = _between(first, last)
        num_later = num_tokens - params.n
        per_token = decode * params.n / num_later if decode is not None and num_later > 0 else None
        for name, value in (
            ("time_per_output_token_seconds", per_token),
            ("queue_time_seconds", _between(stats.queued_ts, scheduled)),
            ("inference_time_seconds", _between(scheduled, last)),
            ("prefill_time_seconds", _between(scheduled, first)),
            ("decode_time_seconds", decode),
            ("prompt_tokens", len(request.prompt_token_ids)),
            ("generation_tokens", num_tokens),
            ("params_n", params.n),
            ("params_max_tokens", params.max_tokens),
            ("num_preemptions", stats.num_preemptions),
        ):
            self._observe(self._histograms[f"vllm:request_{name}"], value)
        seconds = self._clock() - stats.arrival_time
        self._observe(self._histograms["vllm:e2e_request_latency_seconds"], seconds)

    def _observe(self, histogram: Histogram, value: float | None) -> None:
        """Observe a value if there is one; a time that runs backwards counts as 0."""
        if value is None:
            return
        if value < 0:
            self.num_errors += 1
        histogram.observe(max(0.0, value))

    def collect(self) -> Iterator[Metric]:
        """The families of this moment; gauges are 0 while no engine works."""
        engine = self._engine
        stats = engine.stats if engine.state is EngineState.READY else EngineStats()
        yield self._gauge("vllm:num_requests_running", "Sequences that run.", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait.", stats.num_waiting)
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "Share of the pages in use, 0 to 1.", stats.kv_cache_usage
        )
        if engine.info is not None:
            yield self._cache_info(engine.info)
        yield self._state()
        yield self._gauge(
            "jaxserve:seconds_since_engine_news",
            "Seconds without news of an engine that has work.",
            engine.seconds_since_news,
        )
        yield from self._counters()
        for name, (_, text) in HISTOGRAMS.items():
            yield self._histogram(name, text, self._histograms[name])
        yield self._histogram("vllm_ttft_seconds", "Seconds to the first token.", self._ttft)

    def _counters(self) -> Iterator[Metric]:
        for name, text, value in (
            ("vllm:num_preemptions", "Preemptions.", self._preemptions.value),
            ("vllm:prompt_tokens", "Prompt tokens processed.", self._num_prompt_tokens),
            ("vllm:generation_tokens", "Output tokens generated.", self._generation_tokens.value),
            ("vllm_requests", "Requests that ended.", self._num_requests_ended),
            ("jaxserve:num_bad_frames", "Frames that held no message.", self._bad_frames.value),
            ("jaxserve:metric_errors", "Failures inside the metrics.", self.num_errors),
        ):
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        ended = CounterMetricFamily(
            "vllm:request_success",
            "Sequences that ended, by reason.",
            labels=(*LABELS, "finished_reason"),
        )
        for reason, count in self._num_ended.items():
            ended.add_metric((*self._labels, reason), count)
        yield ended

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(name, text, labels=LABELS)
        gauge.add_metric(self._labels, value)
        return gauge

    def _histogram(self, name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
        family = HistogramMetricFamily(name, text, labels=LABELS)
        histogram.add_to(family, self._labels)
        return family

    def _state(self) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(
            "jaxserve:engine_state", "1 for the engine's state.", labels=(*LABELS, "state")
        )
        for state in EngineState:
            gauge.add_metric((*self._labels, state), state is self._engine.state)
        return gauge

    def _cache_info(self, info: EngineInfo) -> GaugeMetricFamily:
        facts = {
            "block_size": info.page_size,
            "num_gpu_blocks": sum(info.num_pages),
            "gpu_memory_utilization": self._engine.config.gpu_memory_utilization,
        }
        gauge = GaugeMetricFamily(
            "vllm:cache_config_info", "Settings of the KV cache.", labels=(*LABELS, *facts)
        )
        gauge.add_metric((*self._labels, *map(str, facts.values())), 1)
        return gauge


def model_name(config: EngineConfig) -> str:
    """The label of an engine's metrics: its first served name, or what it was loaded from."""
    if config.served_model_name:
        return config.served_model_name[0]
    return config.model or DEFAULT_MODEL_NAME


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
