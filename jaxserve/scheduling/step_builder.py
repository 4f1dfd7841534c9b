"""StepBuilder: chooses the rows of one step."""

import operator
from dataclasses import dataclass

from jaxserve.request import Sequence, SequenceStatus
from jaxserve.scheduling.bucket_fit import find_surplus
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.scheduling.held_decodes import holds_decodes, running_prompts
from jaxserve.scheduling.prefix_index import PrefixHit
from jaxserve.scheduling.roster import NewPages, Roster
from jaxserve.step import ScheduledRow, SchedulerOutput


@dataclass(slots=True, kw_only=True)
class _Chunk:
    """Prompt tokens that a sequence gets in this step; its end may still be cut."""

    sequence: Sequence
    num_tokens: int
    new_pages: NewPages
    is_admission: bool

    @property
    def end(self) -> int:
        return self.sequence.num_computed_tokens + self.num_tokens


class StepBuilder:
    """Chooses the rows of one step: decode rows, then prompts, running and waiting ones in order.

    The order is that of the sequences' keys (`policies.py`).

    **Pages.** A row that lacks pages preempts the last running sequences, one after the other,
    but only as many as it needs, and none while the pages of LEAVING sequences will do. What it
    cannot get at once it does without: the row is skipped, and for the rest of the step no
    sequence after it gets any page and no one is admitted. (One before it still may: decode rows
    are chosen before the prompts.)

    **Progress.** The first of all unfinished sequences always advances after finitely many steps.
    So it ends, then the next, and in the end all, as long as no others come to stand before them;
    how many can, says the policy. A key changes once at most, while its sequence waits.

    If the first of all runs, the step has a token for it: decode rows leave one to each other
    sequence that runs (a budget that was lowered grows again), and prompts take theirs in order.
    A sequence that cannot fit the empty pool is never added, and no sequence needs more pages than
    its length end allows, or its window where it sees no more: before it asks for pages it gives
    back those that it does not see any longer. If the first lacks a page, either LEAVING sequences
    hold enough, and these come free when the steps in flight are committed; or another one runs,
    and the last is preempted. That is never the first itself, and no one is admitted in that step.
    So the others become fewer until it has its page or runs alone, and then every page is free or
    its own.

    If the first of all waits, no other is admitted. The first that runs advances for the same
    reasons, so those that run end, one after the other, unless there is room for the first of all
    sooner. When nothing runs or leaves, all pages are free and it is admitted.

    **Prefixes.** The first that waits is not admitted while a running sequence is about to compute
    a page that both need. That one runs, so by the above it computes the page, or leaves. A page
    that would have to be copied is done without where there is no room for it beside its copy.

    **Prompts first.** With `prefill_first`, a step leaves out the decode rows while prompts, of
    those that run and of those that find a slot and pages, fill it: each costs as much in a step of
    its own, and so more rows decode together later. Hardly a slot comes free meanwhile, so all have
    theirs soon; after `MAX_HELD_STEPS` steps decode rows get one in any case. A step that holds no
    prompt after all takes the decode rows.

    **Several tokens a row.** Where every sequence that runs decodes, they are few, there are pages
    for all, and nobody waits, a step may take up to `max_decode_row_tokens` of each: the device
    goes through as many decode steps by itself, and the host has to start only one. Sequences that
    ask for log-probabilities or `min_tokens` take one token a step, and all others with them. So
    such a step preempts no one, and it admits no one.
    """

    def __init__(self, config: SchedulerConfig, roster: Roster, max_num_tokens: int):
        """Start an empty step that takes so many tokens, unless its decode rows have more."""
        self._config = config
        self._roster = roster
        self._max_num_tokens = max_num_tokens
        self._decode_rows: list[ScheduledRow] = []
        self._prompts: list[tuple[int, Sequence]] = []
        self._chunks: list[_Chunk] = []
        self._num_tokens = 0
        self._num_decode_tokens = 0
        self._first_short = len(roster.running)  # index of the first row skipped for its pages
        self._has_skipped = False
        self._can_admit_more = True

    def build(self) -> SchedulerOutput | None:
        """Choose the rows and count them as in flight; None when no sequence can advance."""
        is_held = holds_decodes(self._config, self._roster, self._max_num_tokens)
        if is_held:
            self._prompts += running_prompts(self._roster)
        else:
            self._add_decodes()
        self._limit_prompts()
        self._roster.put_back_late()
        self._add_prompts()
        if is_held and not self._chunks:
            is_held = False
            self._add_decodes()
        self._roster.num_held_steps = self._roster.num_held_steps + 1 if is_held else 0
        self._fit_bucket()
        rows = (*self._decode_rows, *map(_make_row, self._chunks))
        if not rows:
            return None
        offloads, fetches = self._roster.prefixes.take_moves()
        copies = self._roster.prefixes.copies.take_copies()
        return SchedulerOutput(
            rows=rows,
            num_decode_rows=len(self._decode_rows),
            num_tokens=self._num_tokens,
            offloads=offloads,
            fetches=fetches,
            copies=copies,
        )

    def _add_decodes(self) -> None:
        """Add the rows whose next token to compute was sampled on the device.

        For such a sequence `num_tokens` is always `num_computed_tokens + 1`.
        """
        roster, rows, prompts = self._roster, self._decode_rows, self._prompts
        no_pages, page_step = roster.no_pages, roster.page_step
        width = self._decode_width()
        self._can_admit_more = width == 1
        num_tokens = 0
        for index, sequence in enumerate(roster.running):  # what is preempted leaves it at its end
            start = sequence.num_computed_tokens
            if start <= sequence.num_prefill_tokens:
                if start < sequence.num_prefill_tokens:
                    prompts.append((index, sequence))
                    continue
                roster.free_dead_pages(sequence)  # a long chunk leaves many behind
            count = sequence.max_num_tokens - start - 1
            if count > width:
                count = width
            if count <= 0:
                continue
            end = start + count
            new_pages = no_pages
            if -start % page_step < count:
                new_pages = self._obtain_pages(index, sequence, end)
                if new_pages is None:
                    continue
            sequence.num_computed_tokens = end
            sequence.num_pending_tokens += count
            sequence.num_steps_in_flight += 1
            num_tokens += count
            rows.append(
                ScheduledRow(
                    sequence=sequence,
                    start=start,
                    num_scheduled_tokens=count,
                    is_decode=True,
                    is_admission=False,
                    can_sample=True,
                    new_pages=new_pages,
                )
            )
        self._num_tokens = self._num_decode_tokens = num_tokens

    def _decode_width(self) -> int:
        """Tokens that each decode row takes at most; more than 1 if half of them are wanted."""
        width, running = self._config.max_decode_row_tokens, self._roster.running
        if (
            width == 1
            or self._roster.waiting
            or len(running) > self._config.max_multi_token_rows
            or len(running) * width > self._max_num_tokens
        ):
            return 1
        for pool in self._roster.page_pools:
            if pool.num_free < len(running) * -(-width // pool.page_size):
                return 1
        num_left = 0
        for sequence in running:
            start = sequence.num_computed_tokens
            if start < sequence.num_prefill_tokens or not sequence.request.takes_several_tokens:
                return 1
            num_left = max(num_left, sequence.max_num_tokens - start - 1)
        return width if 2 * num_left > width else 1

    def _limit_prompts(self) -> None:
        """Let the policy keep the step short for those that decode."""
        if not self._prompts and not self._roster.waiting:
            return
        limit = self._roster.order.max_prompt_tokens(self._decode_rows)
        if limit is not None:
            self._max_num_tokens = min(self._max_num_tokens, self._num_tokens + limit)

    def _add_prompts(self) -> None:
        """Add prompt chunks in order: of running sequences, and of those that are admitted.

        The decode rows preempted some of the running ones. The indices of the others stay true in
        what they are used for: one that is admitted comes before them and shifts them all alike.
        """
        for index, sequence in self._prompts:
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            self._add_waiting(before=sequence)
            count = self._chunk_size(sequence.num_prefill_tokens - sequence.num_computed_tokens)
            if count == 0:
                return
            end = sequence.num_computed_tokens + count
            new_pages = self._obtain_pages(index, sequence, end)
            if new_pages is None:
                return
            self._add_chunk(sequence, count, new_pages, is_admission=False)
        self._add_waiting(before=None)

    def _add_waiting(self, *, before: Sequence | None) -> None:
        """Admit waiting sequences whose known tokens fit into pages that no prompt needs.

        Args:
          before: the running sequence whose turn it is; None = all have had theirs.
        """
        roster = self._roster
        if self._has_skipped or not self._can_admit_more:
            return
        reserved = None
        while roster.waiting and roster.slot_pool.num_free:
            sequence = roster.waiting[0]
            if before is not None and sequence.order_key > before.order_key:
                return
            self._can_admit_more = False  # unless this one is admitted
            if sequence.status is SequenceStatus.LEAVING:
                return
            if reserved is None:
                reserved = self._count_reserved_pages()
            hit = roster.prefixes.find(sequence)
            num_tokens = len(sequence.token_ids)
            if hit.is_promised or not self._chunk_size(num_tokens - hit.num_tokens):
                return
            wanted = self._add_admission(reserved, hit, num_tokens)
            if hit.sources and not self._can_admit(wanted):
                # The pool may be too small for the source beside the sequence.
                hit = roster.prefixes.find(sequence, may_copy=False)
                wanted = self._add_admission(reserved, hit, num_tokens)
            if not self._can_admit(wanted):
                return
            reserved = wanted
            count = self._chunk_size(num_tokens - hit.num_tokens)
            roster.admit(hit)
            found = _entries(sequence)
            first_pages = roster.count_missing_pages(sequence, hit.num_tokens + count)
            given = roster.give_pages(sequence, first_pages)
            assert given is not None
            counts = zip(reserved, first_pages, hit.num_taken_pages, strict=True)
            reserved = [n - new - taken for n, new, taken in counts]
            new_pages = tuple(map(operator.add, found, given))
            self._add_chunk(sequence, count, new_pages, is_admission=True)
            self._can_admit_more = True

    def _fit_bucket(self) -> None:
        """Cut the last prompt chunk where the step then fills its bucket."""
        if not self._chunks:
            return
        last = self._chunks[-1]
        surplus = find_surplus(
            self._num_tokens,
            self._num_decode_tokens,
            last_chunk=last.num_tokens,
            buckets=self._config.token_buckets,
            has_more=self._has_more_prompt_tokens(),
        )
        if surplus:
            last.num_tokens -= surplus
            self._num_tokens -= surplus
            last.new_pages = self._roster.take_back_pages(last.sequence, last.end, last.new_pages)

    def _has_more_prompt_tokens(self) -> bool:
        """Tell whether the budget or the threshold leaves prompt tokens out of this step."""
        if any(chunk.end < chunk.sequence.num_prefill_tokens for chunk in self._chunks):
            return True
        is_full = self._num_tokens >= self._max_num_tokens
        num_continued = sum(not chunk.is_admission for chunk in self._chunks)
        return is_full and (bool(self._roster.waiting) or num_continued < len(self._prompts))

    def _add_chunk(
        self, sequence: Sequence, count: int, new_pages: NewPages, *, is_admission: bool
    ) -> None:
        self._num_tokens += count
        self._chunks.append(
            _Chunk(
                sequence=sequence, num_tokens=count, new_pages=new_pages, is_admission=is_admission
            )
        )

    def _chunk_size(self, num_left: int) -> int:
        """Limit a prompt's tokens to the step's budget and the threshold."""
        threshold = self._config.long_prefill_token_threshold or num_left
        return min(num_left, threshold, max(0, self._max_num_tokens - self._num_tokens))

    def _count_reserved_pages(self) -> list[int]:
        """Count the pages, for each group, that the prompts which run will still need.

        One that was preempted in this step counts too: no harm, for that is so in one step only.
        """
        roster = self._roster
        admitted = [chunk.sequence for chunk in self._chunks if chunk.is_admission]
        reserved = [0] * len(roster.page_pools)
        for sequence in (*(sequence for _, sequence in self._prompts), *admitted):
            wanted = roster.count_reserved_pages(sequence, sequence.num_prefill_tokens)
            reserved = [sum(counts) for counts in zip(reserved, wanted, strict=True)]
        return reserved

    def _add_admission(self, reserved: list[int], hit: PrefixHit, num_tokens: int) -> list[int]:
        """The pages to keep free, for each group, with those for a sequence that waits."""
        wanted = self._roster.count_admission_pages(hit, num_tokens)
        return [sum(counts) for counts in zip(reserved, wanted, strict=True)]

    def _can_admit(self, reserved: list[int]) -> bool:
        """Tell whether the pages are there, and the watermark is kept if anyone runs."""
        share = self._config.watermark if self._roster.running else 0.0
        return all(
            count + int(share * pool.num_usable) <= pool.num_free
            for count, pool in zip(reserved, self._roster.page_pools, strict=True)
        )

    def _obtain_pages(self, index: int, sequence: Sequence, num_tokens: int) -> NewPages | None:
        """Give a running sequence pages for so many tokens, preempting later ones if need be.

        Args:
          index: of the sequence in `running`.
          sequence: who gets the pages.
          num_tokens: how many of its tokens the page tables must hold.
        """
        roster = self._roster
        roster.free_dead_pages(sequence)
        missing = roster.count_missing_pages(sequence, num_tokens)
        if not any(missing):
            return roster.no_pages
        while index < self._first_short:
            new_pages = roster.give_pages(sequence, missing)
            if new_pages is not None:
                return new_pages
            if roster.running[-1] is sequence or roster.will_free(missing):
                self._first_short = index
                self._has_skipped = True
            else:
                roster.preempt_last()
        return None


def _entries(sequence: Sequence) -> NewPages:
    """The pages that a sequence holds, as entries of its page tables."""
    return tuple(
        tuple(enumerate(table))
        if 0 not in table
        else tuple((index, page) for index, page in enumerate(table) if page)
        for table in sequence.page_tables
    )


def _make_row(chunk: _Chunk) -> ScheduledRow:
    """Count a chunk as in flight and make its row."""
    sequence = chunk.sequence
    start, end = sequence.num_computed_tokens, chunk.end
    can_sample = end == sequence.num_prefill_tokens
    sequence.num_computed_tokens = end
    sequence.num_pending_tokens += can_sample
    sequence.num_steps_in_flight += 1
    return ScheduledRow(
        sequence=sequence,
        start=start,
        num_scheduled_tokens=chunk.num_tokens,
        is_decode=False,
        is_admission=chunk.is_admission,
        can_sample=can_sample,
        new_pages=chunk.new_pages,
    )
