"""A device whose tokens are a pure function of (seed, position), and the engine's loop around it.

The device keeps its own slots and page contents. Each row reads back through its page tables all
that it sees, the whole context or a window of it, so a page that is lost, foreign or overwritten
fails the test. What a step hands out is cleared at its start, since the rows of a step run at once.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from jaxserve.request import Sequence
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.step import ScheduledRow, SchedulerOutput, SequenceUpdate, StepResult
from tests.jaxserve.scheduler_builders import token_at


@dataclass
class _Slot:
    sequence: Sequence
    page_tables: list[list[int]]
    length: int = 0
    last_token: int | None = None
    is_frozen: bool = False
    paths: list[int] = field(default_factory=list)
    """For each token in pages what stands there: a hash of all tokens up to it, and the salt."""

    def extend(self, token: int) -> int:
        before = self.paths[-1] if self.paths else self.sequence.request.cache_salt
        self.paths.append(hash((before, token)))
        return self.paths[-1]


@dataclass
class SimulatedDevice:
    """Runs steps in the order of their dispatch.

    Attributes:
      page_sizes: of the groups.
      windows: of the groups; the tokens that a query sees, or None for all.
      is_eager: whether a decode row emits all the tokens it may, or a number that varies.
      poisoned: seeds of sequences whose logits are NaN.
      num_frozen_rows: rows that were scheduled after their sequence had ended here.
      num_cached_tokens: tokens of admitted rows that were in pages already.
      num_offloads: pages copied to the host.
      num_fetches: pages copied back.
      num_copies: pages copied to others.
    """

    page_sizes: tuple[int, ...]
    windows: tuple[int | None, ...] = (None,)
    is_eager: bool = True
    poisoned: set[int] = field(default_factory=set)
    num_frozen_rows: int = 0
    num_cached_tokens: int = 0
    num_offloads: int = 0
    num_fetches: int = 0
    num_copies: int = 0
    _host: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    _slots: dict[int, _Slot] = field(default_factory=dict)
    _memory: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def run(self, output: SchedulerOutput) -> StepResult:
        decodes = [row.is_decode for row in output.rows]
        assert decodes == sorted(decodes, reverse=True) and sum(decodes) == output.num_decode_rows
        assert output.num_tokens == sum(row.num_scheduled_tokens for row in output.rows) > 0
        assert len({row.sequence for row in output.rows}) == len(output.rows)
        of_decode_rows = [row.num_scheduled_tokens for row in output.rows if row.is_decode]
        assert len(of_decode_rows) == len(output.rows) or max(of_decode_rows, default=1) == 1
        self._move(output)
        self._clear(output)
        new_tokens = [self._run_row(row) for row in output.rows]
        tokens = np.full((len(new_tokens) + 1, max(1, *map(len, new_tokens), 1)), -1, np.int32)
        for index, row_tokens in enumerate(new_tokens):
            tokens[index, : len(row_tokens)] = row_tokens
        return StepResult(
            tokens=tokens,
            num_new=np.array([*map(len, new_tokens), 0], np.int32),
            is_finite=np.array([row.sequence.seed not in self.poisoned for row in output.rows]),
        )

    def lose_memory(self) -> None:
        """Pages and slots hold nothing any more; the host's memory stays."""
        self._memory.clear()
        self._slots.clear()

    def _move(self, output: SchedulerOutput) -> None:
        for move in output.offloads:
            offsets = range(self.page_sizes[move.group])
            keys = [(move.group, move.page, offset) for offset in offsets]
            self._host[move.group, move.host_slot] = [self._memory[key] for key in keys]
            self.num_offloads += 1
        for move in output.fetches:
            for offset, path in enumerate(self._host[move.group, move.host_slot]):
                self._memory[move.group, move.page, offset] = path
            self.num_fetches += 1
        self._copy(output)

    def _copy(self, output: SchedulerOutput) -> None:
        written = {(copy.group, copy.page) for copy in output.copies}
        assert len(written) == len(output.copies)
        assert written.isdisjoint((move.group, move.page) for move in output.fetches)
        for copy in output.copies:
            assert copy.page and copy.source and (copy.group, copy.source) not in written
            for offset in range(self.page_sizes[copy.group]):
                self._memory.pop((copy.group, copy.page, offset), None)
                path = self._memory.get((copy.group, copy.source, offset))
                if path is not None:
                    self._memory[copy.group, copy.page, offset] = path
            self.num_copies += 1

    def _clear(self, output: SchedulerOutput) -> None:
        for row in output.rows:
            for group, pages in enumerate(row.new_pages):
                size = self.page_sizes[group]
                for index, page in pages:
                    # What stands before the row was found in the prefix cache.
                    num_found = max(0, row.start - index * size) if row.is_admission else 0
                    for offset in range(num_found, size):
                        self._memory.pop((group, page, offset), None)

    def _run_row(self, row: ScheduledRow) -> list[int]:
        assert row.sequence.state_slot is not None
        if row.is_admission:
            slot = _Slot(row.sequence, [[] for _ in self.page_sizes])
            self._slots[row.sequence.state_slot] = slot
            for token in row.sequence.token_ids[: row.start]:
                slot.extend(token)
            slot.length = row.start
            self.num_cached_tokens += row.start
        slot = self._slots[row.sequence.state_slot]
        assert slot.sequence is row.sequence
        for table, pages in zip(slot.page_tables, row.new_pages, strict=True):
            for index, page in pages:
                assert index >= len(table) and page != 0
                assert index == len(table) or (row.is_admission and self.windows != (None,))
                table += [0] * (index - len(table))
                table.append(page)
        if row.is_decode:
            return self._run_decode(slot, row)
        assert row.start == slot.length
        for token in row.sequence.token_ids[row.start :][: row.num_scheduled_tokens]:
            self._write(slot, token)
        assert slot.length == row.start + row.num_scheduled_tokens
        self._read(slot, row.start)
        return [self._sample(slot)] if row.can_sample else []

    def _run_decode(self, slot: _Slot, row: ScheduledRow) -> list[int]:
        if slot.is_frozen:
            self.num_frozen_rows += 1
            return []
        assert slot.length <= row.start
        count = row.num_scheduled_tokens
        if not self.is_eager:
            count = 1 + token_at(row.sequence.seed + 1, slot.length) % count
        tokens = []
        while len(tokens) < count and not slot.is_frozen:
            assert slot.last_token is not None
            self._write(slot, slot.last_token)
            tokens.append(self._sample(slot))
        return tokens

    def _write(self, slot: _Slot, token: int) -> None:
        path = slot.extend(token)
        for group, page_size in enumerate(self.page_sizes):
            page = slot.page_tables[group][slot.length // page_size]
            key = (group, page, slot.length % page_size)
            self._memory[key] = path
        slot.length += 1

    def _read(self, slot: _Slot, first_query: int) -> None:
        """Read what the queries of a row see, from the first one on."""
        for group, page_size in enumerate(self.page_sizes):
            table, window = slot.page_tables[group], self.windows[group]
            first_key = 0 if window is None else max(0, first_query - window + 1)
            for position in range(first_key, slot.length):
                key = (group, table[position // page_size], position % page_size)
                assert self._memory[key] == slot.paths[position]

    def _sample(self, slot: _Slot) -> int:
        sequence, seed = slot.sequence, slot.sequence.seed
        self._read(slot, slot.length - 1)
        assert slot.length < sequence.max_num_tokens
        token = slot.last_token = token_at(seed, slot.length)
        num_outputs = slot.length + 1 - sequence.num_prompt_tokens
        is_late = num_outputs >= sequence.request.sampling_params.min_tokens
        slot.is_frozen = is_late and token in sequence.end_token_ids
        return token


class SimulatedEngine:
    """The engine's loop: fill the steps in flight, then commit the oldest."""

    def __init__(self, scheduler: Scheduler, **device):
        self.scheduler = scheduler
        self.page_pools = scheduler._roster.page_pools
        self.device = SimulatedDevice(
            tuple(pool.page_size for pool in self.page_pools),
            tuple(pool.sliding_window for pool in self.page_pools),
            **device,
        )
        self.in_flight: deque[tuple[SchedulerOutput, StepResult]] = deque()
        self.num_steps = 0
        self.updates: list[SequenceUpdate] = []

    def dispatch(self) -> SchedulerOutput | None:
        output = self.scheduler.schedule()
        self.scheduler.check_invariants()
        if output is not None:
            self.in_flight.append((output, self.device.run(output)))
        return output

    def collect(self) -> list[SequenceUpdate]:
        self.num_steps += 1
        return self.take(self.scheduler.commit(*self.in_flight.popleft()))

    def take(self, updates: list[SequenceUpdate]) -> list[SequenceUpdate]:
        self.scheduler.check_invariants()
        self.updates += updates
        return updates

    def add(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.scheduler.add(sequence)

    def abort(self, *args, **kwargs) -> list[SequenceUpdate]:
        return self.take(self.scheduler.abort(*args, **kwargs))

    def step(self) -> list[SequenceUpdate]:
        while self.dispatch() is not None:
            pass
        assert self.in_flight or not self.scheduler.has_unfinished, "nothing can advance"
        return self.collect() if self.in_flight else []

    def drain(self, max_steps: int = 2_000) -> None:
        """Run to the end; then every slot and page must be back."""
        while self.scheduler.has_unfinished:
            assert self.num_steps < max_steps, f"not done after {max_steps} steps"
            self.step()
        assert not self.in_flight and self.scheduler.kv_cache_usage == 0
        assert all(pool.num_free == pool.num_usable for pool in self.page_pools)
        slots = self.scheduler._roster.slot_pool
        assert slots.num_free == slots.max_num_seqs

    def output_of(self, name: str, index: int = 0) -> list[int]:
        updates = [u for u in self.updates if (u.request_id, u.index) == (name, index)]
        return [token for update in updates for token in update.new_token_ids]

    def finals_of(self, name: str, index: int = 0) -> list[SequenceUpdate]:
        updates = [u for u in self.updates if (u.request_id, u.index) == (name, index)]
        return [update for update in updates if update.finish_reason is not None]
