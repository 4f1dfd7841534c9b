"""The values that pass between scheduler, runner and text: SchedulerOutput down, StepResult up."""

from dataclasses import dataclass

import msgspec
import numpy as np

from jaxserve.request import FinishReason, Sequence


class ScheduledRow(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """One sequence's share of a step; a msgspec struct, since it is made for each row and step.

    The step computes the tokens `[start, start + num_scheduled_tokens)` of the sequence.

    Attributes:
      sequence: whose row it is.
      start: `num_computed_tokens` before this step.
      num_scheduled_tokens: at least 1. A decode row samples as many tokens as it computes, at
        most; it has more than 1 only when a program emits several tokens a row (W > 1).
      is_decode: the one token to compute was sampled on the device by an earlier step, so its
        id is not sent. Otherwise the ids come from `sequence.token_ids`.
      is_admission: the sequence has just received its slot; its parameters are sent.
      can_sample: the step computes the sequence's last existing token, and so samples the next.
      new_pages: for each cache group, `(index in the page table, page id)` of pages that
        the sequence received for this step.
    """

    sequence: Sequence
    start: int
    num_scheduled_tokens: int
    is_decode: bool
    is_admission: bool
    can_sample: bool
    new_pages: tuple[tuple[tuple[int, int], ...], ...]


class PageMove(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One page between the device's cache and a slot of the host's memory.

    Attributes:
      group: index of the cache group; each has slots of its own.
      page: id of the device's page.
      host_slot: in [0, num_host_pages).
    """

    group: int
    page: int
    host_slot: int


class PageCopy(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One page of the device's cache to be copied to another.

    Attributes:
      group: index of the cache group.
      source: id of the page that is read.
      page: id of the page that is overwritten.
    """

    group: int
    source: int
    page: int


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One step: decode rows first, then rows of prompt chunks.

    Before its programs run all offloads, then all fetches, then all copies. So an offload takes
    what the page held before this step, a fetch may name a slot that an offload of this step fills,
    and a copy may read a page that a fetch of this step fills. The pages that copies write differ,
    and none of them is read by a copy, or written by a fetch, of the same step.

    Attributes:
      rows: what each sequence computes.
      num_decode_rows: the first so many.
      num_tokens: of all rows.
      offloads: device pages whose content goes to host slots; of two to one slot the last counts.
      fetches: host slots whose content goes to device pages; of two to one page the last counts.
      copies: device pages whose content goes to other device pages.
    """

    rows: tuple[ScheduledRow, ...]
    num_decode_rows: int
    num_tokens: int
    offloads: tuple[PageMove, ...] = ()
    fetches: tuple[PageMove, ...] = ()
    copies: tuple[PageCopy, ...] = ()

    @property
    def moves_pages(self) -> bool:
        """Whether pages that the prefix cache knows go to the host or come back."""
        return bool(self.offloads or self.fetches)


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities at one sampled position.

    Attributes:
      logprob: of the chosen token.
      rank: of the chosen token, 1 = most likely.
      top_ids: the most likely ids, best first.
      top_logprobs: theirs.
    """

    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the device returned for the rows of one step, as numpy arrays; S rows or more.

    Attributes:
      tokens: int32[S, W], sampled ids; the first `num_new` of a row are valid.
      num_new: int32[S], 0 for rows that sampled nothing, were frozen or are padding.
      is_finite: bool[S], False where a row's logits held NaN or no finite value.
      logprobs: for each row W entries, or None where none were asked.
    """

    tokens: np.ndarray
    num_new: np.ndarray
    is_finite: np.ndarray
    logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...] | None = None


class SequenceUpdate(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """News of one sequence after a step; the only thing that leaves the engine upwards.

    Made for each row and step, so the garbage collector does not follow it: no cycle goes through
    its values, and it would run a full collection every few hundred steps.

    Attributes:
      scheduled_seconds: when the sequence was first scheduled, on the engine's monotonic clock;
        None when it never was. The same in all its updates.
    """

    request_id: str
    index: int
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    scheduled_seconds: float | None = None


class StopAbort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Tells the engine to end a sequence that is already finished for its client.

    Attributes:
      request_id: of the request.
      index: which of its sequences.
      num_output_tokens: tokens that the client keeps, the one that completed the stop included.
      stop: the stop string; None when the text could not be made.
    """

    request_id: str
    index: int
    num_output_tokens: int
    stop: str | None
