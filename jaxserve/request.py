"""What a client asked (Request) and its running state on the host (Sequence)."""

import enum
import math
from dataclasses import dataclass, field

import msgspec

from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.page_digests import PageDigests


class FinishReason(enum.StrEnum):
    """Why a sequence ended; the values are the ones that clients see."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"


class SequenceStatus(enum.Enum):
    """Where a sequence stands in the scheduler."""

    WAITING = enum.auto()
    """Owns no slot and no page; also the state after a preemption."""
    RUNNING = enum.auto()
    """Owns a state slot and pages."""
    LEAVING = enum.auto()
    """Preempted, aborted or finished, but steps that hold it are still in flight."""
    FINISHED = enum.auto()
    """Owns nothing; one final update has been given out."""


class Request(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One validated request; never changed after it was made.

    Thousands are made ahead of a first step. The garbage collector does not follow them: no cycle
    goes through their values.

    Attributes:
      request_id: unique among unfinished requests.
      prompt_token_ids: at least one id, each inside the vocabulary.
      sampling_params: a private copy; `max_tokens` is an int here (the room left when the
        client gave none).
      eos_token_ids: ids that end a sequence unless `ignore_eos`.
      arrival_seconds: monotonic clock.
      priority: lower runs earlier (used by policies other than first come, first served).
      cache_salt: shares computed prefixes only with requests of the same salt.
      timeout_seconds: from arrival on; then the request ends, wherever it stands. None = never.
      ttft_goal_seconds: wanted time to the first token, for the policy `slo`; None = the default.
      tpot_goal_seconds: wanted time of each further token, likewise.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    arrival_seconds: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    timeout_seconds: float | None = None
    ttft_goal_seconds: float | None = None
    tpot_goal_seconds: float | None = None

    @property
    def takes_several_tokens(self) -> bool:
        """Whether one step may sample several of its tokens: if `SampleMode.is_fused` for all."""
        params = self.sampling_params
        return params.logprobs is None and not params.min_tokens


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """The running state of one of a request's `n` sequences; host only, owned by the scheduler.

    `num_computed_tokens` counts what has been *dispatched*: the keys and values of
    `[0, num_computed_tokens)` are in pages, or will be when the steps in flight are done.

    Attributes:
      request: what was asked.
      index: which of the request's `n` sequences.
      seed: of this sequence's random numbers, 64 bits.
      token_ids: prompt and the output tokens that the host knows, in order.
      num_computed_tokens: see above.
      num_pending_tokens: tokens that steps in flight will sample at most.
      num_steps_in_flight: dispatched steps that hold this sequence and are not committed.
      num_prefill_tokens: tokens known on the host when the sequence got its slot; their ids are
        sent to the device, and those of all later tokens are sampled there. Set at admission.
      max_num_tokens: the sequence ends when it has so many, prompt included. Set when added.
      end_token_ids: end-of-sequence and stop ids that end this sequence. Set when added.
      state_slot: row in the device state while RUNNING or LEAVING, else None.
      page_tables: for each cache group, the ids of the pages that hold the tokens
        `[i * page_size, (i + 1) * page_size)`; 0 where the page was given back because it lies
        before the group's window. vLLM calls it the block table.
      num_freed_pages: for each cache group, how many pages, the first ones, were given back so.
      page_digests: for each cache group, what names its pages in the prefix cache; empty without
        one. Set when added.
      num_cached_pages: for each cache group, how many pages, the first ones, the prefix cache was
        told of.
      num_promised_pages: so many of the first pages others may wait for; 0 when it does not run.
      promised_tail: names the tokens behind them that others may wait for, too; or empty.
      order_key: where the sequence stands among all; the smaller comes first. Set when added.
      latest_start_seconds: if it has got no slot by then, on the scheduler's clock, its key becomes
        `late_order_key`. Set when added.
      late_order_key: see above.
      scheduled_seconds: when the sequence first got a slot, on the scheduler's clock.
      sample_mode: the `SampleMode` of all its rows that sample; None before the first of them, and
        always where it depends on the row (`min_tokens`). Set by the batch builder.
    """

    request: Request
    index: int
    seed: int
    token_ids: list[int]
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    num_steps_in_flight: int = 0
    num_prefill_tokens: int = 0
    max_num_tokens: int = 0
    end_token_ids: frozenset[int] = frozenset()
    state_slot: int | None = None
    page_tables: list[list[int]] = field(default_factory=list)
    num_freed_pages: list[int] = field(default_factory=list)
    page_digests: list[PageDigests] = field(default_factory=list)
    num_cached_pages: list[int] = field(default_factory=list)
    num_promised_pages: int = 0
    promised_tail: bytes = b""
    order_key: tuple[float, ...] = ()
    latest_start_seconds: float = math.inf
    late_order_key: tuple[float, ...] = ()
    scheduled_seconds: float | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    sample_mode: int | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that the host knows."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens that exist on the device: known on the host, or sampled in a step in flight."""
        return len(self.token_ids) + self.num_pending_tokens
