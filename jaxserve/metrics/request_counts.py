"""RequestCounts: what is counted of requests: tokens, ends and times."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jaxserve.metrics.histograms import Histogram
from jaxserve.outputs import RequestOutput, RequestStateStats
from jaxserve.request import FinishReason, Request
from jaxserve.sampling_params import RequestOutputKind
from jaxserve.scheduling.scheduler import NOT_FINITE


@dataclass(slots=True)
class _Seen:
    """What was counted of an unfinished request.

    Attributes:
      last_seconds: when its newest token came; None before the first.
      num_tokens: of all its sequences.
      ended: indices of sequences whose ends are counted.
      lengths: output tokens by index; kept where there are several sequences.
    """

    last_seconds: float | None = None
    num_tokens: int = 0
    ended: set[int] = field(default_factory=set)
    lengths: dict[int, int] = field(default_factory=dict)

    def note_lengths(self, output: RequestOutput, *, is_delta: bool) -> None:
        """Follow how long each sequence is; a delta holds only its new tokens."""
        for sequence in output.outputs:
            known = self.lengths.get(sequence.index, 0) if is_delta else 0
            self.lengths[sequence.index] = known + len(sequence.token_ids)


class RequestCounts:
    """Counts requests by their outputs.

    Args:
      histograms: those of HISTOGRAMS by name, to observe in.
      clock: monotonic seconds, the clock of the requests' times.

    Attributes:
      num_prompt_tokens: of requests that have a token; once for all of a request's sequences.
      num_cached_tokens: those of them that were found in the prefix cache.
      num_requests_ended: requests, whatever they ended by.
      num_ended: sequences that ended, by reason.
      num_corrupted: those of them whose logits were not finite.
      num_backward_times: times that ran backwards and were counted as 0.
    """

    def __init__(self, histograms: Mapping[str, Histogram], clock: Callable[[], float]):
        self._histograms, self._clock = histograms, clock
        self._ttft = histograms["vllm:time_to_first_token_seconds"]
        self._token_gaps = histograms["vllm:inter_token_latency_seconds"]
        self._seen: dict[str, _Seen] = {}
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.num_requests_ended = self.num_corrupted = self.num_backward_times = 0
        self.num_ended = dict.fromkeys(map(str, FinishReason), 0)

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
                self.num_prompt_tokens += len(request.prompt_token_ids)
                self.num_cached_tokens += output.num_cached_tokens or 0
                self._observe(self._ttft, stats.first_token_latency)
            elif num_new := num_tokens - seen.num_tokens:
                gap = (stats.last_token_ts - seen.last_seconds) * len(output.outputs) / num_new
                self._token_gaps.observe(gap, num_new)
            seen.last_seconds, seen.num_tokens = stats.last_token_ts, num_tokens
        params = request.sampling_params
        if params.n > 1:
            seen.note_lengths(output, is_delta=params.output_kind is RequestOutputKind.DELTA)
        for sequence in output.outputs:
            # Cumulative outputs show a sequence that has ended again and again.
            reason = sequence.finish_reason
            if reason is not None and sequence.index not in seen.ended:
                seen.ended.add(sequence.index)
                self.num_ended[reason] += 1
                self.num_corrupted += sequence.error == NOT_FINITE
        if output.finished:
            del self._seen[output.request_id]
            self.num_requests_ended += 1
            self._observe_end(request, output, stats, max(seen.lengths.values(), default=None))

    def aborted(self, request: Request) -> None:
        """Count a request whose client has gone, and those of its sequences that had not ended."""
        seen = self._seen.pop(request.request_id, None)
        num_ended = 0 if seen is None else len(seen.ended)
        self.num_ended[FinishReason.ABORT] += request.sampling_params.n - num_ended
        self.num_requests_ended += 1

    def _observe_end(
        self, request: Request, output: RequestOutput, stats: RequestStateStats, longest: int | None
    ) -> None:
        """Observe the times and counts of a finished request.

        Args:
          request: the request.
          output: its last one.
          stats: the output's.
          longest: tokens of its longest sequence; None where it has one.
        """
        params, num_tokens = request.sampling_params, stats.num_generation_tokens
        num_prompt = len(request.prompt_token_ids)
        scheduled, first, last = stats.scheduled_ts, stats.first_token_ts, stats.last_token_ts
        decode = _between(first, last)
        num_later = num_tokens - params.n
        num_computed = None if first is None else num_prompt - (output.num_cached_tokens or 0)
        per_token = decode * params.n / num_later if decode is not None and num_later > 0 else None
        for name, value in (
            ("time_per_output_token_seconds", per_token),
            ("queue_time_seconds", _between(stats.queued_ts, scheduled)),
            ("inference_time_seconds", _between(scheduled, last)),
            ("prefill_time_seconds", _between(scheduled, first)),
            ("decode_time_seconds", decode),
            ("prompt_tokens", num_prompt),
            ("prefill_kv_computed_tokens", num_computed),
            ("generation_tokens", num_tokens),
            ("max_num_generation_tokens", num_tokens if longest is None else longest),
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
            self.num_backward_times += 1
        histogram.observe(max(0.0, value))


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
