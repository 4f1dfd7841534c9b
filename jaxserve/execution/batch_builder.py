"""build_batch: a scheduler's decision as the packed buffers that the step reads; numpy only."""

from array import array
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from jaxserve.execution.buckets import Bucket, BucketTable
from jaxserve.execution.packed_layout import (
    NUM_PAGE_COPIES,
    PackedLayout,
    admission_layout,
    step_layout,
)
from jaxserve.execution.sample_mode import SampleMode, mode_of_row
from jaxserve.execution.slot_record import write_record
from jaxserve.step import PageCopy, PageMove, ScheduledRow, SchedulerOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """One step, ready for upload.

    Attributes:
      bucket: whose program takes it. A decode step of few rows whose sampler is in no program of a
        forward pass takes the bucket of a step with prompt tokens.
      packed: int32 buffer in the bucket's layout.
      admissions: buffers in the admission layout, to be applied before the step.
      mode: what the sampler has to do; None when no row samples.
      sampler_rows: R of the sampler, where the bucket fuses none and a row samples; else 0.
      num_rows: real rows.
      num_tokens: real tokens.
      num_logprobs: for each real row the log-probabilities asked for, or None; empty when no
        row asks for any.
      offloads: pages to copy to the host ahead of the step.
      fetches: pages to copy back after them.
      copies: buffers of the program that copies pages to others, which runs last before the step.
    """

    bucket: Bucket
    packed: np.ndarray
    admissions: tuple[np.ndarray, ...]
    mode: SampleMode | None
    sampler_rows: int
    num_rows: int
    num_tokens: int
    num_logprobs: tuple[int | None, ...]
    offloads: tuple[PageMove, ...] = ()
    fetches: tuple[PageMove, ...] = ()
    copies: tuple[np.ndarray, ...] = ()


class BatchBuilder:
    """Builds packed batches, and guards every index: JAX clamps and drops bad ones in silence.

    Attributes:
      num_host_pages: slots of each cache group in the host's memory.
      takes_copies: whether steps may ask for copies of pages.
    """

    def __init__(
        self,
        buckets: BucketTable,
        *,
        max_num_seqs: int,
        page_size: int,
        num_pages: tuple[int, ...],
        max_pages_per_seq: int,
        vocab_size: int,
        num_host_pages: int = 0,
        takes_copies: bool = False,
    ):
        self._buckets, self._unused_slot = buckets, max_num_seqs
        self._num_pages, self._max_pages = num_pages, max_pages_per_seq
        self._vocab_size, self.num_host_pages = vocab_size, num_host_pages
        self.takes_copies = takes_copies
        groups = len(num_pages)
        self._layouts = {
            bucket: step_layout(bucket, num_groups=groups, page_size=page_size)
            for bucket in buckets.all()
        }
        self._admission = admission_layout(max_num_seqs=max_num_seqs, num_groups=groups)

    def layout(self, bucket: Bucket) -> PackedLayout:
        """The packed layout of a bucket."""
        return self._layouts[bucket]

    @property
    def admission_layout(self) -> PackedLayout:
        """The layout of buffers that only change the state."""
        return self._admission

    def build(self, output: SchedulerOutput) -> PackedBatch:
        """Pack one step.

        Raises:
          ValueError: an index is out of bounds, which is a bug of the scheduler.
        """
        rows = output.rows
        slots = [row.sequence.state_slot for row in rows]
        mode = _mode_of_rows(rows)
        has_sampler = mode is not None and (
            mode.is_fused or not self._buckets.fuses_sampler(len(rows))
        )
        is_decode_only = output.num_decode_rows == len(rows) and has_sampler
        num_scheduled = [row.num_scheduled_tokens for row in rows]
        num_steps = max(num_scheduled[: output.num_decode_rows], default=1)
        if num_steps > 1 and not is_decode_only:
            raise ValueError(f"a mixed step takes a token of each decode row; got {num_steps}")
        context = None
        if len(rows) <= self._buckets.short_context_rows:
            context = max(row.start + row.num_scheduled_tokens for row in rows)
        bucket = self._buckets.select(
            output.num_tokens,
            len(rows),
            is_decode_only=is_decode_only,
            num_steps=num_steps,
            context=context,
        )
        layout = self._layouts[bucket]
        packed = layout.empty(self._unused_slot)
        views = layout.split(packed)
        views["counts"][:] = len(rows), output.num_decode_rows
        views["slot_ids"][: len(rows)] = slots
        views["num_scheduled"][: len(rows)] = num_scheduled
        if not is_decode_only:
            self._pack_tokens(views["token_ids"], output)
        admissions = self._pack_changes(layout, views, output)
        self._guard_rows(views, len(rows))
        self._guard_moves(output.offloads + output.fetches)
        return PackedBatch(
            bucket=bucket,
            packed=packed,
            admissions=admissions,
            mode=mode,
            sampler_rows=self._select_sampler(bucket, mode, len(rows)),
            num_rows=len(rows),
            num_tokens=output.num_tokens,
            num_logprobs=_num_logprobs(rows) if mode is SampleMode.FULL else (),
            offloads=output.offloads,
            fetches=output.fetches,
            copies=self._pack_copies(output.copies) if output.copies else (),
        )

    def empty(
        self, bucket: Bucket, mode: SampleMode | None = None, *, sampler_rows: int = 0
    ) -> PackedBatch:
        """A step without rows, which runs the programs of a bucket and changes nothing.

        Args:
          bucket: of the step.
          mode: of its sampler; None = it has none.
          sampler_rows: R, where the bucket fuses none.
        """
        return PackedBatch(
            bucket=bucket,
            packed=self._layouts[bucket].empty(self._unused_slot),
            admissions=(self._admission.empty(self._unused_slot),),
            mode=mode,
            sampler_rows=sampler_rows,
            num_rows=0,
            num_tokens=0,
            num_logprobs=(),
            copies=(self._empty_pairs(),) if self.takes_copies else (),
        )

    def _select_sampler(self, bucket: Bucket, mode: SampleMode | None, num_rows: int) -> int:
        if mode is None or bucket.fuses_sampler:
            return 0
        return self._buckets.select_sampler(num_rows, is_greedy=mode == SampleMode.GREEDY)

    def _pack_tokens(self, token_ids: np.ndarray, output: SchedulerOutput) -> None:
        position = output.num_decode_rows
        for row in output.rows[output.num_decode_rows :]:
            stop = row.start + row.num_scheduled_tokens
            chunk = array("i", row.sequence.token_ids[row.start : stop])
            token_ids[position : position + len(chunk)] = chunk
            position += row.num_scheduled_tokens
        lowest, highest = token_ids.min(initial=0), token_ids.max(initial=0)
        if lowest < 0 or highest >= self._vocab_size:
            got = lowest if lowest < 0 else highest
            raise ValueError(f"token ids must be in [0, {self._vocab_size}); got {got}")

    def _pack_changes(
        self, layout: PackedLayout, views: dict[str, np.ndarray], output: SchedulerOutput
    ) -> tuple[np.ndarray, ...]:
        """Pages and admissions go with the step when they fit, else ahead of it."""
        admitted = [row for row in output.rows[output.num_decode_rows :] if row.is_admission]
        updates = [self._page_updates(output.rows, group) for group in range(layout.num_groups)]
        fits = len(admitted) <= layout.num_admissions
        if fits and all(len(update) <= layout.num_page_updates for update in updates):
            self._fill_changes(views, admitted, updates)
            return ()
        return self._pack_admissions(admitted, updates)

    def _pack_admissions(
        self, admitted: list[ScheduledRow], updates: list[np.ndarray]
    ) -> tuple[np.ndarray, ...]:
        buffers, size = [], self._admission.num_page_updates
        rounds = max(1, *(-(-len(update) // size) for update in updates))
        for i in range(rounds):
            buffer = self._admission.empty(self._unused_slot)
            part = [update[i * size : (i + 1) * size] for update in updates]
            self._fill_changes(self._admission.split(buffer), admitted if i == 0 else [], part)
            buffers.append(buffer)
        return tuple(buffers)

    def _fill_changes(
        self,
        views: dict[str, np.ndarray],
        admitted: list[ScheduledRow],
        updates: list[np.ndarray],
    ) -> None:
        for i, row in enumerate(admitted):
            views["admitted_slots"][i] = row.sequence.state_slot
            write_record(views["admitted_records"][i], row.sequence, row.start)
        for group, update in enumerate(updates):
            if len(update):
                entries = views["page_updates"][group, : len(update)]
                entries[...] = update
                self._guard_pages(entries, self._num_pages[group])

    def _pack_copies(self, copies: tuple[PageCopy, ...]) -> tuple[np.ndarray, ...]:
        """The `pairs` of `copy_pages`, as often as the fullest group needs."""
        if not self.takes_copies:
            raise ValueError(f"copies of pages have no program here; got {len(copies)}")
        by_group = [
            [c for c in copies if c.group == group] for group in range(len(self._num_pages))
        ]
        if sum(map(len, by_group)) < len(copies):
            raise ValueError(f"groups must be in [0, {len(by_group)}); got {copies}")
        buffers = []
        for start in range(0, max(map(len, by_group)), NUM_PAGE_COPIES):
            pairs = self._empty_pairs()
            for group, of_group in enumerate(by_group):
                part = of_group[start : start + NUM_PAGE_COPIES]
                pairs[0, group, : len(part)] = [copy.source for copy in part]
                pairs[1, group, : len(part)] = [copy.page for copy in part]
                self._guard_copies(pairs[:, group, : len(part)], self._num_pages[group])
            buffers.append(pairs)
        return tuple(buffers)

    def _empty_pairs(self) -> np.ndarray:
        """All padding."""
        return np.zeros((2, len(self._num_pages), NUM_PAGE_COPIES), np.int32)

    @staticmethod
    def _guard_copies(pairs: np.ndarray, num_pages: int) -> None:
        if pairs.size and (pairs.min() < 1 or pairs.max() >= num_pages):
            raise ValueError(f"page ids must be in [1, {num_pages}); got {pairs}")

    @staticmethod
    def _page_updates(rows: tuple[ScheduledRow, ...], group: int) -> np.ndarray:
        """int32[n, 3]: slot, index in its page table, page."""
        changed = [row for row in rows if row.new_pages[group]]
        counts = [len(row.new_pages[group]) for row in changed]
        updates = np.empty((sum(counts), 3), np.int32)
        if changed:
            slots: Any = [row.sequence.state_slot for row in changed]
            updates[:, 0] = np.repeat(slots, counts)
            entries = chain.from_iterable(row.new_pages[group] for row in changed)
            flat = np.fromiter(chain.from_iterable(entries), np.int32, 2 * len(updates))
            updates[:, 1:] = flat.reshape(-1, 2)
        return updates

    def _guard_rows(self, views: dict[str, np.ndarray], num_rows: int) -> None:
        slots = views["slot_ids"][:num_rows]
        if slots.min() < 0 or slots.max() >= self._unused_slot:
            raise ValueError(f"state slots must be in [0, {self._unused_slot}); got {slots}")
        if np.bincount(slots).max() > 1:
            raise ValueError(f"state slots must differ; got {slots}")

    def _guard_pages(self, entries: np.ndarray, num_pages: int) -> None:
        pages, index = entries[:, 2], entries[:, 1]
        if pages.min() < 1 or pages.max() >= num_pages:
            raise ValueError(f"page ids must be in [1, {num_pages}); got {pages}")
        if index.min() < 0 or index.max() >= self._max_pages:
            raise ValueError(f"page table indices must be in [0, {self._max_pages}); got {index}")

    def _guard_moves(self, moves: tuple[PageMove, ...]) -> None:
        for move in moves:
            if not 0 <= move.group < len(self._num_pages):
                raise ValueError(f"groups must be in [0, {len(self._num_pages)}); got {move}")
            if not 1 <= move.page < self._num_pages[move.group]:
                raise ValueError(
                    f"page ids must be in [1, {self._num_pages[move.group]}); got {move}"
                )
            if not 0 <= move.host_slot < self.num_host_pages:
                raise ValueError(f"host slots must be in [0, {self.num_host_pages}); got {move}")


def _mode_of_rows(rows: tuple[ScheduledRow, ...]) -> SampleMode | None:
    """The mode of a step; None when no row samples (inner chunks of prompts only)."""
    modes = {row.sequence.sample_mode for row in rows if row.can_sample}
    known = {mode for mode in modes if mode is not None}
    if len(known) < len(modes):
        known = {_mode_of_row(row) for row in rows if row.can_sample}
    return SampleMode(max(known)) if known else None


def _mode_of_row(row: ScheduledRow) -> int:
    """The mode of a row that samples; it is kept with a sequence whose rows all have the same."""
    sequence = row.sequence
    if sequence.sample_mode is not None:
        return sequence.sample_mode
    mode = int(mode_of_row(row))
    if not sequence.request.sampling_params.min_tokens:
        sequence.sample_mode = mode
    return mode


def _num_logprobs(rows: tuple[ScheduledRow, ...]) -> tuple[int | None, ...]:
    return tuple(
        row.sequence.request.sampling_params.logprobs if row.can_sample else None for row in rows
    )
