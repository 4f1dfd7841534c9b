"""Scheduler: decides which tokens each step computes, and takes in what the step returned."""

import operator
import time
from collections import deque
from collections.abc import Callable, Iterable

from jaxserve.request import FinishReason, Sequence, SequenceStatus
from jaxserve.scheduling.admission import check_length
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.scheduling.deadlines import Deadlines
from jaxserve.scheduling.endings import append_tokens, find_end_token_ids, find_max_num_tokens
from jaxserve.scheduling.facts import SchedulerFacts
from jaxserve.scheduling.invariants import check_books, num_reserved_tokens
from jaxserve.scheduling.order import SequenceOrder
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.policies import FIRST_COME_FIRST_SERVED, Policy
from jaxserve.scheduling.roster import Roster
from jaxserve.scheduling.step_builder import StepBuilder
from jaxserve.scheduling.token_limit import TokenLimit
from jaxserve.step import SchedulerOutput, SequenceUpdate, StepResult, TokenLogprobs

_NO_TOKENS = "the step must sample at least 1 token for a running row; got 0"
NOT_FINITE = "logits must be finite; got NaN, or no finite value"


class Scheduler(SchedulerFacts):
    """Continuous batching in the order of a policy, with several steps in flight.

    There are no phases: `num_computed_tokens` of each sequence catches up with its `num_tokens`,
    and `schedule` hands each its share of the step's token budget. Steps are dispatched before
    the results of earlier ones are known, under these rules:

    1. `max_tokens` and `max_model_len` are known beforehand; no step is scheduled past them.
    2. An ending id is tested on the device, which freezes the row. The row may be scheduled
       again before the host knows; it then returns no token.
    3. A stop string comes as an `abort` with the number of tokens that the client keeps.
    4. A sequence that ended, was aborted or preempted keeps slot and pages until no step in
       flight holds it. One that runs gives back pages that lie before its window; see
       `Roster.free_dead_pages` for why that is safe.
    5. A row returns a number of tokens, from none to all that it reserved.

    Source: Yu et al. 2022 (Orca, iteration-level scheduling); Agrawal et al. 2023 (Sarathi,
    chunked prefill); vLLM V1's scheduler for the arithmetic without phases.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        page_pools: tuple[PagePool, ...],
        clock: Callable[[], float] = time.monotonic,
        policy: Policy = FIRST_COME_FIRST_SERVED,
    ):
        """Start without sequences.

        Args:
          config: the limits.
          page_pools: the pool of each cache group, at least one, all pages free.
          clock: monotonic seconds; the arrival times of requests are on the same clock.
          policy: who comes first.
        """
        self._order = SequenceOrder(policy, config, clock)
        super().__init__(config, Roster(page_pools, config, clock, self._order))
        self._clock, self._deadlines = clock, Deadlines(config.max_queue_seconds)
        self._in_flight: deque[SchedulerOutput] = deque()
        self._token_limit = TokenLimit(config)

    def reset_prefix_cache(self) -> None:
        """Forget all computed prefixes; what runs keeps its pages."""
        self._roster.prefixes.forget()

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence into the queue.

        Raises:
          RequestTooLongError: the prompt leaves no room for a token under `max_model_len`, or
            prompt and `max_tokens` can never fit into the pages of some group.
          ValueError: an unfinished sequence has the same request id and index.
        """
        max_model_len = self._config.max_model_len
        max_num_tokens = find_max_num_tokens(sequence.request, max_model_len)
        check_length(
            sequence.num_prompt_tokens,
            max_num_tokens,
            max_model_len=max_model_len,
            max_row_tokens=self._config.max_row_tokens,
            page_pools=self._roster.page_pools,
        )
        sequence.max_num_tokens = max_num_tokens
        sequence.end_token_ids = find_end_token_ids(sequence.request)
        self._roster.add(sequence)
        self._deadlines.add(sequence)

    def expire(self) -> list[SequenceUpdate]:
        """End the sequences whose time is over; their tokens so far stay.

        Returns:
          The final update of each; `scheduled_seconds` tells whether it ever ran.
        """
        late = self._deadlines.pop_late(self._clock())
        for sequence in late:
            self._roster.end(sequence, FinishReason.TIMEOUT)
        return [_make_update(sequence) for sequence in late]

    def schedule(self) -> SchedulerOutput | None:
        """Choose the next step and count it as in flight.

        Returns:
          The step, or None when no sequence can advance now or `max_steps_in_flight` steps are
          in flight. Each step must come back, in the same order, to `commit`,
          `fail_step` or `retry_step`.
        """
        if len(self._in_flight) >= self._config.max_steps_in_flight:
            return None
        output = StepBuilder(self._config, self._roster, self._token_limit.now).build()
        if output is not None:
            self._in_flight.append(output)
            self._order.start_step(output)
        return output

    def commit(self, output: SchedulerOutput, result: StepResult) -> list[SequenceUpdate]:
        """Take in the tokens of the oldest step in flight.

        Tokens after the end of a sequence are dropped. A row that is not finite, or that samples
        nothing though its sequence runs, ends its sequence with an error and no other; of several
        tokens in such a row none is taken.

        Returns:
          One update for each sequence that got tokens or ended, in the order of the rows.

        Raises:
          ValueError: `output` is not the oldest step in flight, or the result has too few rows
            or, in a row, more tokens than the row reserved.
        """
        if not self._in_flight or self._in_flight[0] is not output:
            raise ValueError("output must be the oldest step in flight; got another one")
        reserved = [num_reserved_tokens(row) for row in output.rows]
        num_new = result.num_new.tolist()[: len(reserved)]
        if any(map(operator.gt, num_new, reserved)) or len(num_new) < len(reserved):
            raise ValueError(f"num_new must be at most {reserved}, row by row; got {num_new}")
        self._in_flight.popleft()
        self._token_limit.note_success()
        self._order.end_step(output)
        num_rows, width = len(reserved), result.tokens.shape[1]
        roster, updates = self._roster, []
        page_step = roster.page_step
        rows = zip(
            output.rows,
            reserved,
            num_new,
            result.is_finite[:num_rows].tolist(),
            zip(*result.tokens[:num_rows].T.tolist(), strict=True),
            result.logprobs or (None,) * num_rows,
            strict=True,
        )
        for row, room, count, is_finite, new_tokens, entries in rows:
            sequence = row.sequence
            sequence.num_steps_in_flight -= 1
            sequence.num_pending_tokens -= room
            num_filled = 0
            if is_finite:
                num_written = count if row.is_decode else row.num_scheduled_tokens
                end = row.start + num_written
                if end % page_step < num_written:  # else it fills no page
                    if count > 1 and sequence.finish_reason is None:
                        num_filled = end  # not all of these tokens are known yet
                    else:
                        roster.prefixes.remember(sequence, end)
                if row.can_sample and not row.is_decode:
                    roster.prefixes.finish_prompt(sequence, end)
            if sequence.finish_reason is None:
                if not is_finite:
                    updates.append(_end_with_error(roster, sequence, NOT_FINITE))
                elif count:
                    sequence.num_computed_tokens -= room - count
                    if count < width:
                        new_tokens = new_tokens[:count]
                    updates.append(_accept(roster, sequence, new_tokens, entries, num_filled))
                elif row.can_sample:
                    updates.append(_end_with_error(roster, sequence, _NO_TOKENS))
            if sequence.status is SequenceStatus.LEAVING:
                roster.settle(sequence)
        return updates

    def fail_step(self, output: SchedulerOutput, error: str) -> list[SequenceUpdate]:
        """Take back any step in flight that raised; its unfinished sequences end with `error`.

        Where its pages may not have been moved, the caller resets the prefix cache.
        """
        self._in_flight.remove(output)
        self._order.drop_step(output)
        updates = []
        for row in output.rows:
            sequence = row.sequence
            sequence.num_steps_in_flight -= 1
            sequence.num_pending_tokens -= num_reserved_tokens(row)
            if sequence.finish_reason is None:
                updates.append(_end_with_error(self._roster, sequence, error))
            elif sequence.status is SequenceStatus.LEAVING:
                self._roster.settle(sequence)
        return updates

    def retry_step(self, output: SchedulerOutput) -> None:
        """Take back the newest step in flight, which did not run or whose results are lost.

        Its running sequences are preempted, and with them those that come after them in the order
        of the roster. They keep their tokens, and compute and sample again what the step would have
        brought: nothing is lost, and nothing comes twice. Where its pages may not have been moved,
        the caller resets the prefix cache.

        Raises:
          ValueError: `output` is not the newest step in flight; later steps go on from its tokens.
        """
        if not self._in_flight or self._in_flight[-1] is not output:
            raise ValueError("output must be the newest step in flight; got another one")
        self._in_flight.pop()
        self._order.drop_step(output)
        roster, sequences = self._roster, {row.sequence for row in output.rows}
        for row in output.rows:
            row.sequence.num_steps_in_flight -= 1
            row.sequence.num_pending_tokens -= num_reserved_tokens(row)
            row.sequence.num_computed_tokens -= row.num_scheduled_tokens
        while not sequences.isdisjoint(roster.running):
            roster.preempt_last()
        for row in output.rows:
            if row.sequence.status is SequenceStatus.LEAVING:
                roster.settle(row.sequence)

    def lower_token_limit(self, output: SchedulerOutput) -> bool:
        """Make the next steps half as large as one that found no memory; they grow again later.

        Returns:
          False when it makes no sense to try again: steps are as small as can be.
        """
        return self._token_limit.lower(output.num_tokens)

    def drop_cache(self) -> None:
        """The cache is lost: all that runs is preempted, and all computed prefixes are forgotten.

        Raises:
          RuntimeError: steps are in flight; each must come back first.
        """
        if self._in_flight:
            raise RuntimeError(f"no step must be in flight; got {len(self._in_flight)}")
        while self._roster.running:
            self._roster.preempt_last()
        self.reset_prefix_cache()

    def fail(self, error: str, sequences: Iterable[Sequence]) -> list[SequenceUpdate]:
        """End sequences with `error`, in whatever state they are; ended ones stay as they are."""
        return [
            _end_with_error(self._roster, sequence, error)
            for sequence in sequences
            if sequence.finish_reason is None
        ]

    def fail_all(self, error: str) -> list[SequenceUpdate]:
        """Take back all steps in flight and end everything with `error`; forget all prefixes."""
        updates = []
        while self._in_flight:
            updates += self.fail_step(self._in_flight[-1], error)
        roster = self._roster
        updates += self.fail(error, [*roster.running, *roster.waiting])
        self.reset_prefix_cache()
        return updates

    def abort(
        self,
        request_id: str,
        index: int | None = None,
        *,
        finish_reason: FinishReason = FinishReason.ABORT,
        stop_reason: int | str | None = None,
        num_output_tokens: int | None = None,
    ) -> list[SequenceUpdate]:
        """End sequences from outside, at once and in whatever state they are.

        Args:
          request_id: of the sequences; an unknown or finished one is ignored.
          index: which of the request's sequences; None = all.
          finish_reason: STOP when the text side found a stop string.
          stop_reason: that stop string.
          num_output_tokens: output tokens that the client keeps; None = all known ones.

        Returns:
          The final update of each sequence that was unfinished.
        """
        if num_output_tokens is not None and num_output_tokens < 0:
            raise ValueError(f"num_output_tokens must be at least 0; got {num_output_tokens}")
        updates = []
        for sequence in self._roster.find(request_id, index):
            if num_output_tokens is not None:
                del sequence.token_ids[sequence.num_prompt_tokens + num_output_tokens :]
            self._roster.end(sequence, finish_reason, stop_reason)
            updates.append(_make_update(sequence))
        return updates

    def check_invariants(self) -> None:
        """Check that slots, pages, states and steps in flight agree.

        Raises:
          RuntimeError: they do not; names the law and the counts.
        """
        check_books(self._roster, (row for output in self._in_flight for row in output.rows))


def _accept(
    roster: Roster,
    sequence: Sequence,
    tokens: tuple[int, ...],
    logprobs: tuple[TokenLogprobs, ...] | None,
    num_filled: int,
) -> SequenceUpdate:
    """Append sampled tokens to a sequence, and end it where it ends.

    Args:
      roster: of the sequence.
      sequence: which runs.
      tokens: sampled.
      logprobs: theirs.
      num_filled: leading tokens whose pages are to be remembered, now that all of them are known.
    """
    kept, ending = append_tokens(sequence, tokens)
    if num_filled:
        roster.prefixes.remember(sequence, num_filled)
    if ending is not None:
        roster.end(sequence, *ending)
    return _make_update(sequence, kept, logprobs)


def _end_with_error(roster: Roster, sequence: Sequence, error: str) -> SequenceUpdate:
    roster.end(sequence, FinishReason.ERROR)
    return _make_update(sequence, error=error)


def _make_update(
    sequence: Sequence,
    new_token_ids: tuple[int, ...] = (),
    logprobs: tuple[TokenLogprobs, ...] | None = None,
    error: str | None = None,
) -> SequenceUpdate:
    if logprobs is not None:
        logprobs = logprobs[: len(new_token_ids)]
    return SequenceUpdate(
        request_id=sequence.request.request_id,
        index=sequence.index,
        new_token_ids=new_token_ids,
        logprobs=logprobs,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        error=error,
        num_cached_tokens=sequence.num_cached_tokens,
        num_preemptions=sequence.num_preemptions,
        scheduled_seconds=sequence.scheduled_seconds,
    )
