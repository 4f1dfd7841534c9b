"""Any history of adding, scheduling, committing and aborting keeps the scheduler's laws."""

import functools
from collections import Counter

import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxserve.errors import RequestTooLongError
from jaxserve.request import FinishReason, Sequence, SequenceStatus
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.policies import POLICIES
from tests.jaxserve.scheduler_builders import (
    STOP_ID,
    expected_output,
    make_scheduler,
    make_sequence,
)
from tests.jaxserve.simulated_engine import SimulatedEngine

MAX_MODEL_LEN = 14
num_window_pages_freed = Counter[str]()
num_cached_tokens = Counter[str]()
num_late = Counter[str]()
num_moves = Counter[str]()
num_copies = Counter[str]()
num_faults = Counter[str]()
"""What the histories came across; a law that was never put to use proves nothing."""


@functools.cache
def most_pages(num_tokens: int, page_size: int, window: int | None, longest_row: int) -> int:
    """Pages that some row of a sequence of so many tokens touches at most, counted one by one."""
    seen = num_tokens if window is None else window
    counts = [
        len({key // page_size for key in range(max(0, start - seen + 1), end)})
        for start in range(num_tokens)
        for end in range(start + 1, min(start + longest_row, num_tokens) + 1)
    ]
    return max(counts)


class SchedulerMachine(RuleBasedStateMachine):
    """Pools for one or two sequences; 1 to 3 steps in flight; 1 or 2 groups; W of 1 or 3.

    A group has full attention or a window; a pool of a window group is no larger than it must be.
    """

    @initialize(
        groups=st.lists(
            st.tuples(st.sampled_from([1, 2, 3, 4]), st.sampled_from([None, None, 1, 2, 5])),
            min_size=1,
            max_size=2,
        ),
        have_one_page_size=st.sampled_from([True, True, False]),
        num_spare_tokens=st.one_of(st.integers(-4, 8), st.integers(-4, 8), st.just(30)),
        max_num_seqs=st.integers(1, 4),
        max_steps_in_flight=st.integers(1, 3),
        max_decode_row_tokens=st.sampled_from([1, 1, 3]),
        threshold=st.sampled_from([0, 0, 2]),
        watermark=st.sampled_from([0.0, 0.0, 0.3]),
        enable_prefix_caching=st.sampled_from([True, True, False]),
        max_queue_seconds=st.sampled_from([None, None, 2.0]),
        num_host_pages=st.sampled_from([0, 2, 8, 8]),
        policy=st.sampled_from(sorted(POLICIES)),
        prefill_first=st.booleans(),
    )
    def start(
        self,
        groups,
        have_one_page_size,
        num_spare_tokens,
        max_num_seqs,
        max_steps_in_flight,
        max_decode_row_tokens,
        threshold,
        watermark,
        enable_prefix_caching,
        max_queue_seconds,
        num_host_pages,
        policy,
        prefill_first,
    ):
        self.now, self.num_host_pages = 0.0, num_host_pages
        if have_one_page_size:
            groups = [(groups[0][0], window) for _, window in groups]
        budget = max_num_seqs * (max_decode_row_tokens if num_spare_tokens % 2 else 1) + 2
        longest_row = max(threshold or budget, max_decode_row_tokens)
        longest_row += (max_steps_in_flight - 1) * (max_decode_row_tokens - 1)
        self.longest_row = min(longest_row, MAX_MODEL_LEN)
        self.scheduler = make_scheduler(
            pools=tuple(self.make_pool(size, window, num_spare_tokens) for size, window in groups),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            token_buckets=(2, 4, 8, 16),
            max_steps_in_flight=max_steps_in_flight,
            max_decode_row_tokens=max_decode_row_tokens,
            long_prefill_token_threshold=threshold,
            watermark=watermark,
            enable_prefix_caching=enable_prefix_caching,
            max_queue_seconds=max_queue_seconds,
            clock=lambda: self.now,
            policy=POLICIES[policy](),
            prefill_first=prefill_first and policy != "slo",
        )
        self.engine = SimulatedEngine(self.scheduler, is_eager=False)
        self.sequences: dict[tuple[str, int], Sequence] = {}
        self.failed: set[tuple[str, int]] = set()
        self.ended_outside: dict[tuple[str, int], tuple[FinishReason, int | None]] = {}
        self.num_taken = 0
        self.max_steps = 20

    def make_pool(self, page_size: int, window: int | None, num_spare_tokens: int) -> PagePool:
        num_tokens = MAX_MODEL_LEN + num_spare_tokens
        num_usable = 1 + num_tokens // page_size
        if window is not None:
            needed = most_pages(MAX_MODEL_LEN, page_size, window, self.longest_row)
            num_usable = min(num_usable, needed + max(0, num_spare_tokens) // page_size)
        return PagePool(
            1 + num_usable,
            page_size,
            sliding_window=window,
            num_host_pages=self.num_host_pages,
        )

    @rule(
        prompt=st.one_of(st.integers(1, 5), st.integers(1, MAX_MODEL_LEN)),
        max_tokens=st.integers(1, 12),
        min_tokens=st.integers(0, 4),
        ignore_eos=st.booleans(),
        has_stop_id=st.booleans(),
        n=st.sampled_from([1, 2, 4]),
        shared=st.tuples(st.integers(1, 2), st.integers(0, MAX_MODEL_LEN)),
        cache_salt=st.sampled_from([None, None, "salt"]),
        timeout=st.sampled_from([None, None, 0.5, 1.0]),
        priority=st.integers(-1, 1),
    )
    def add(self, prompt, max_tokens, min_tokens, ignore_eos, has_stop_id, n, **others):
        name = f"r{len(self.sequences)}"
        for index in range(n):
            sequence = make_sequence(
                name,
                prompt,
                max_tokens,
                seed=1000 + len(self.sequences),
                index=index,
                n=n,
                arrival=self.now,
                min_tokens=min(min_tokens, max_tokens),
                ignore_eos=ignore_eos,
                stop_token_ids=[STOP_ID] if has_stop_id else [],
                **others,
            )
            limit = min(prompt + max_tokens, MAX_MODEL_LEN)
            pools = self.engine.page_pools
            fits = all(
                pool.num_usable
                >= most_pages(limit, pool.page_size, pool.sliding_window, self.longest_row)
                for pool in pools
            )
            if prompt < MAX_MODEL_LEN and fits:
                self.scheduler.add(sequence)
                self.sequences[name, index] = sequence
                self.max_steps += 2 * limit
            else:
                with pytest.raises(RequestTooLongError):
                    self.scheduler.add(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), num_new=st.integers(1, 4), max_tokens=st.integers(1, 4))
    def continue_one(self, data, num_new, max_tokens):
        """The next turn of a chat, or a prompt that differs from another's end on."""
        key = data.draw(st.sampled_from(sorted(self.sequences)))
        beginning = tuple(self.sequences[key].token_ids)
        beginning = beginning[: data.draw(st.integers(1, len(beginning)))]
        salt = self.sequences[key].request.cache_salt
        self.add(
            len(beginning) + num_new,
            max_tokens,
            0,
            True,
            False,
            1,
            beginning=beginning,
            cache_salt=salt,
        )

    @rule()
    def schedule(self):
        is_full = len(self.engine.in_flight) == self.scheduler._config.max_steps_in_flight
        assert not (self.engine.dispatch() and is_full)

    @rule()
    def retry(self):
        """A step that finds no memory is taken back before it runs."""
        output = self.scheduler.schedule()
        if output is not None:
            self.forget_moved(output)
            self.scheduler.retry_step(output)
            num_faults["retried"] += 1
            self.max_steps += 2 * MAX_MODEL_LEN

    @precondition(lambda self: self.engine.in_flight)
    @rule(is_cache_lost=st.sampled_from([False, False, True]))
    def take_back(self, is_cache_lost):
        """Results are lost, or the whole cache with them."""
        while self.engine.in_flight:
            self.scheduler.retry_step(self.engine.in_flight.pop()[0])
            self.scheduler.check_invariants()
            num_faults["taken back"] += 1
            if not is_cache_lost:
                break
        if is_cache_lost:
            self.scheduler.drop_cache()
            self.engine.device.lose_memory()
            num_faults["cache lost"] += 1
        self.max_steps += 4 * MAX_MODEL_LEN * len(self.unfinished())

    @rule(is_meant=st.sampled_from([True, False, False]))
    def fail(self, is_meant):
        """A step that raises ends its own sequences."""
        if not is_meant:
            return
        output = self.scheduler.schedule()
        if output is not None:
            self.forget_moved(output)
            for update in self.engine.take(self.scheduler.fail_step(output, "it raised")):
                self.failed.add((update.request_id, update.index))
            num_faults["failed"] += 1

    def forget_moved(self, output):
        """Pages were not moved; see `StepRecovery.recover`."""
        if output.moves_pages:
            self.scheduler.reset_prefix_cache()

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def commit(self):
        self.engine.collect()

    @rule(times=st.integers(1, 6))
    def step(self, times):
        for _ in range(times):
            self.engine.step()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def abort_one(self, data):
        key = data.draw(st.sampled_from(sorted(self.sequences)))
        self.end_outside(key, FinishReason.ABORT, None)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def abort_request(self, data):
        name, _ = data.draw(st.sampled_from(sorted(self.sequences)))
        for key in self.unfinished():
            if key[0] == name:
                self.ended_outside[key] = (FinishReason.ABORT, None)
        self.engine.abort(name)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def find_stop_string(self, data):
        key = data.draw(st.sampled_from(sorted(self.sequences)))
        num_seen = len(self.engine.output_of(*key))
        assume(num_seen)
        self.end_outside(key, FinishReason.STOP, data.draw(st.integers(0, num_seen)))

    @rule()
    def abort_unknown(self):
        assert self.engine.abort("unknown") == []

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data())
    def poison(self, data):
        key = data.draw(st.sampled_from(self.unfinished()))
        self.engine.device.poisoned.add(self.sequences[key].seed)

    def unfinished(self) -> list[tuple[str, int]]:
        return sorted(key for key, s in self.sequences.items() if s.finish_reason is None)

    def end_outside(self, key, reason, num_kept):
        is_unfinished = self.sequences[key].finish_reason is None
        updates = self.engine.abort(
            *key, finish_reason=reason, stop_reason="x", num_output_tokens=num_kept
        )
        assert len(updates) == is_unfinished
        if is_unfinished:
            self.ended_outside[key] = (reason, num_kept)
            assert self.sequences[key].status is not SequenceStatus.RUNNING

    @invariant()
    def the_books_agree(self):
        self.scheduler.check_invariants()
        assert 0 <= self.scheduler.kv_cache_usage <= 1

    @invariant()
    def no_update_follows_a_final_one(self):
        for update in self.engine.updates[self.num_taken :]:
            key = (update.request_id, update.index)
            assert self.sequences[key].finish_reason is update.finish_reason or (
                update.finish_reason is None
            )
            finals = self.engine.finals_of(*key)
            assert len(finals) <= 1 and update.num_preemptions <= self.scheduler.num_preemptions
            last = [u for u in self.engine.updates if (u.request_id, u.index) == key][-1]
            assert not finals or last is finals[0]
        self.num_taken = len(self.engine.updates)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def let_time_pass(self, seconds):
        self.now += seconds
        due = {key for key in self.unfinished() if self.is_late(self.sequences[key])}
        updates = self.engine.take(self.scheduler.expire())
        assert {(u.request_id, u.index) for u in updates} == due
        for update in updates:
            assert update.finish_reason is FinishReason.TIMEOUT
            self.ended_outside[update.request_id, update.index] = (FinishReason.TIMEOUT, None)
            num_late["waiting" if update.scheduled_seconds is None else "running"] += 1

    def is_late(self, sequence):
        request, limit = sequence.request, self.scheduler._config.max_queue_seconds
        waited = self.now - request.arrival_seconds
        is_over = request.timeout_seconds is not None and waited >= request.timeout_seconds
        never_ran = sequence.scheduled_seconds is None
        return is_over or (limit is not None and never_ran and waited >= limit)

    @rule(is_meant=st.sampled_from([True, False, False, False]))
    def reset_prefix_cache(self, is_meant):
        if not is_meant:
            return
        self.scheduler.reset_prefix_cache()
        assert not any(pool.num_cached for pool in self.engine.page_pools)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.engine.drain(self.engine.num_steps + self.max_steps)
        num_cached = self.engine.device.num_cached_tokens
        num_cached_tokens["all"] += num_cached
        num_moves["offloads"] += self.engine.device.num_offloads
        num_moves["fetches"] += self.engine.device.num_fetches
        num_copies["all"] += self.engine.device.num_copies
        if len(self.engine.page_pools) > 1:
            num_copies["two groups"] += self.engine.device.num_copies
        if self.scheduler.num_preemptions:
            num_copies["preempting"] += self.engine.device.num_copies
        num_copies["counted"] += self.scheduler.num_copied_pages
        assert not self.scheduler._roster.prefixes._promised
        if self.scheduler.num_window_pages_freed:
            num_cached_tokens["windows"] += num_cached
        if self.scheduler.num_preemptions:
            num_cached_tokens["preempting"] += num_cached
        num_window_pages_freed["all"] += self.scheduler.num_window_pages_freed
        if self.scheduler.num_preemptions:
            num_window_pages_freed["preempting"] += self.scheduler.num_window_pages_freed
        for key, sequence in self.sequences.items():
            self.check_output(key, sequence)

    def check_output(self, key, sequence):
        output = self.engine.output_of(*key)
        expected, reason = expected_output(sequence, MAX_MODEL_LEN)
        (final,) = self.engine.finals_of(*key)
        assert sequence.status is SequenceStatus.FINISHED
        if key in self.ended_outside:
            reason, num_kept = self.ended_outside[key]
            assert output == expected[: len(output)]
            assert sequence.num_output_tokens == (len(output) if num_kept is None else num_kept)
        elif final.finish_reason is FinishReason.ERROR:
            is_poisoned = sequence.seed in self.engine.device.poisoned
            assert (is_poisoned or key in self.failed) and final.error
            assert output == expected[: len(output)]
            return
        else:
            assert output == expected == sequence.token_ids[sequence.num_prompt_tokens :]
        assert final.finish_reason is reason and final.error is None


_HEALTH = [HealthCheck.filter_too_much, HealthCheck.too_slow]
_QUICK = settings(
    max_examples=800,
    stateful_step_count=40,
    deadline=None,
    database=None,
    derandomize=True,  # so that what the histories came across is the same in every run
    suppress_health_check=_HEALTH,
)


@pytest.mark.bugbank
def test_every_short_history_keeps_the_laws():
    num_window_pages_freed.clear()
    num_cached_tokens.clear()
    num_late.clear()
    num_moves.clear()
    num_copies.clear()
    num_faults.clear()
    run_state_machine_as_test(SchedulerMachine, settings=_QUICK)
    assert min(num_window_pages_freed["all"], num_window_pages_freed["preempting"]) > 100
    assert min(num_cached_tokens[name] for name in ("all", "windows", "preempting")) > 100
    # Rare ones, a lost cache among them, have tests of their own in test_scheduler_retry.py.
    assert sum(num_faults.values()) > 20
    assert min(num_moves["offloads"], num_moves["fetches"]) > 0
    assert min(num_copies[name] for name in ("all", "two groups", "preempting")) > 100, num_copies
    assert num_copies["counted"] >= num_copies["all"]  # a step that is taken back does not run
    assert min(num_late["running"], num_late["waiting"]) > 0


@pytest.mark.bugbank
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_ten_thousand_histories_keep_the_laws():
    long = settings(_QUICK, max_examples=10_000, stateful_step_count=60, derandomize=False)
    run_state_machine_as_test(SchedulerMachine, settings=long)
