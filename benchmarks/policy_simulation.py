"""The scheduler on a virtual clock: traces of requests, a device that only takes time, and figures.

The device has the times of Llama-3-8B on one H200, fitted to docs/performance.md (2026-11-30).
"""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from jaxserve.request import Request, Sequence
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.policies import Policy
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.step import SchedulerOutput, StepResult

EOS, TOKEN = 0, 7
PAGE_SIZE = 16
NUM_PAGES = 50_000
MAX_MODEL_LEN = 32_768
TOKEN_BUCKETS = tuple(2**power for power in range(7, 14))
ROW_BUCKETS = (8, 32, 64, 128, 256, 384, 512, 768, 1024)

WEIGHTS_SECONDS = 4.3e-3
ROW_SECONDS = 1.6e-5
PROMPT_TOKEN_SECONDS = 2.16e-5
CONTEXT_TOKEN_SECONDS = 32 * 2 * 8 * 128 * 2 / 4.3e12
"""Keys and values of 32 layers with 8 heads of 128, bf16, over the bytes read in a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace; it ends with its `num_output_tokens`-th token.

    Attributes:
      kind: names its part of the load.
      max_tokens: what its client asks for; at least `num_output_tokens`.
    """

    arrival_seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    kind: str = "chat"
    priority: int = 0
    ttft_goal_seconds: float | None = None
    tpot_goal_seconds: float | None = None


@dataclass(slots=True)
class Served:
    """What became of one request.

    Attributes:
      request: of the trace.
      order_key: the place that the policy gave it when it was added.
      scheduled_seconds: when it first got a slot.
      token_seconds: when each of its tokens was there.
    """

    request: TraceRequest
    order_key: tuple[float, ...] = ()
    scheduled_seconds: float = 0.0
    token_seconds: list[float] = field(default_factory=list)

    @property
    def ttft_seconds(self) -> float:
        """From arrival to the first token."""
        return self.token_seconds[0] - self.request.arrival_seconds

    @property
    def tpot_seconds(self) -> float:
        """Mean time of the tokens after the first; 0 when there are none."""
        num_later = len(self.token_seconds) - 1
        return (self.token_seconds[-1] - self.token_seconds[0]) / num_later if num_later else 0.0

    @property
    def has_met_goals(self) -> bool:
        """Whether both goals were met; a goal that is not set is met."""
        request = self.request
        is_late = self.ttft_seconds > (request.ttft_goal_seconds or np.inf)
        return not is_late and self.tpot_seconds <= (request.tpot_goal_seconds or np.inf)


@dataclass(slots=True)
class VirtualClock:
    """Seconds that pass only when told so."""

    now_seconds: float = 0.0

    def __call__(self) -> float:
        """The time, as `time.monotonic` gives it."""
        return self.now_seconds


class TimedDevice:
    """Samples any token, ends sequences where the trace says, and tells how long a step takes."""

    def __init__(self, num_output_tokens: dict[str, int], max_num_seqs: int):
        """Start with empty slots.

        Args:
          num_output_tokens: of each request, by its id.
          max_num_seqs: slots.
        """
        self._num_output_tokens = num_output_tokens
        self._num_left = np.zeros(max_num_seqs, np.int64)

    def run(self, output: SchedulerOutput) -> tuple[float, StepResult]:
        """Run a step; its seconds and its result."""
        rows = output.rows
        for row in rows[output.num_decode_rows :]:
            if row.is_admission:
                sequence = row.sequence
                total = self._num_output_tokens[sequence.request.request_id]
                self._num_left[sequence.state_slot] = total - sequence.num_output_tokens
        slots = np.array([row.sequence.state_slot for row in rows])
        left = self._num_left[slots]
        new = np.array([row.can_sample for row in rows]) & (left > 0)
        self._num_left[slots] = left - new
        result = StepResult(
            tokens=np.where(left == 1, EOS, TOKEN)[:, None].astype(np.int32),
            num_new=new.astype(np.int32),
            is_finite=np.ones(len(rows), bool),
        )
        return step_seconds(output), result


def step_seconds(output: SchedulerOutput) -> float:
    """How long a step takes: products over its padded tokens, then attention of its decode rows.

    Products take as long as reading the weights, or as computing, whichever is more.
    """
    num_rows = output.num_decode_rows
    products = WEIGHTS_SECONDS + ROW_SECONDS * num_rows
    if num_rows < len(output.rows):
        num_tokens = TOKEN_BUCKETS[bisect_left(TOKEN_BUCKETS, output.num_tokens)]
        products = max(products, PROMPT_TOKEN_SECONDS * num_tokens)
    context = sum(row.start for row in output.rows[:num_rows])
    return products + CONTEXT_TOKEN_SECONDS * context


def simulate(
    trace: list[TraceRequest],
    policy: Policy,
    *,
    num_pages: int = NUM_PAGES,
    max_num_seqs: int = 1024,
) -> list[Served]:
    """Serve a trace, two steps in flight, until nothing is left.

    Args:
      trace: in the order of arrival.
      policy: of the scheduler.
      num_pages: of the cache, the null page included.
      max_num_seqs: slots.

    Returns:
      What became of the requests, in the order of the trace.
    """
    clock = VirtualClock()
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=TOKEN_BUCKETS[-1],
        max_model_len=MAX_MODEL_LEN,
        token_buckets=TOKEN_BUCKETS,
        row_buckets=ROW_BUCKETS,
    )
    scheduler = Scheduler(config, (PagePool(num_pages, PAGE_SIZE),), clock, policy)
    served = {str(index): Served(request) for index, request in enumerate(trace)}
    lengths = {name: one.request.num_output_tokens for name, one in served.items()}
    device = TimedDevice(lengths, max_num_seqs)
    to_come = deque(served)
    in_flight: deque[tuple[SchedulerOutput, float, StepResult]] = deque()
    device_free_seconds = 0.0
    while to_come or in_flight or scheduler.has_unfinished:
        if not in_flight and not scheduler.has_unfinished:
            first = served[to_come[0]].request.arrival_seconds
            clock.now_seconds = max(clock.now_seconds, first)
        while to_come and served[to_come[0]].request.arrival_seconds <= clock.now_seconds:
            name = to_come.popleft()
            sequence = _make_sequence(name, served[name].request)
            scheduler.add(sequence)
            served[name].order_key = sequence.order_key
        while (output := scheduler.schedule()) is not None:
            seconds, result = device.run(output)
            device_free_seconds = max(device_free_seconds, clock.now_seconds) + seconds
            in_flight.append((output, device_free_seconds, result))
        output, clock.now_seconds, result = in_flight.popleft()
        for update in scheduler.commit(output, result):
            one = served[update.request_id]
            assert update.error is None and update.scheduled_seconds is not None
            one.scheduled_seconds = update.scheduled_seconds
            one.token_seconds += [clock.now_seconds] * len(update.new_token_ids)
    return list(served.values())


def _make_sequence(name: str, of_trace: TraceRequest) -> Sequence:
    request = Request(
        request_id=name,
        prompt_token_ids=(TOKEN,) * of_trace.num_prompt_tokens,
        sampling_params=SamplingParams(max_tokens=of_trace.max_tokens),
        eos_token_ids=(EOS,),
        arrival_seconds=of_trace.arrival_seconds,
        priority=of_trace.priority,
        ttft_goal_seconds=of_trace.ttft_goal_seconds,
        tpot_goal_seconds=of_trace.tpot_goal_seconds,
    )
    return Sequence(request=request, index=0, seed=0, token_ids=list(request.prompt_token_ids))
