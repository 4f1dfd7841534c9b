"""The next step is dispatched before the last one is read, and so the host's time is hidden."""

from collections import deque

import pytest

from jaxserve.step import SchedulerOutput, SequenceUpdate, StepResult
from tests.jaxserve.scheduler_builders import expected_output, make_scheduler, make_sequence
from tests.jaxserve.simulated_engine import SimulatedDevice

STEP_MS = 10.0
HOST_MS = 4.0
NUM_TOKENS = 60


class TimedEngine:
    """The engine's step on a virtual clock: the device takes 10 ms a step, the host 4 ms.

    Half of the host's time passes before a dispatch (schedule, build), half after a collect
    (commit). `log` holds ("dispatch" or "collect", step) in the order in which they happened.
    """

    def __init__(self, max_steps_in_flight: int):
        self.scheduler = make_scheduler(max_steps_in_flight=max_steps_in_flight, max_num_seqs=8)
        self._max_steps_in_flight = max_steps_in_flight
        self._device = SimulatedDevice((4,))
        self._in_flight: deque[tuple[SchedulerOutput, tuple[int, StepResult, float]]] = deque()
        self.now_ms = self._device_free_ms = self.device_idle_ms = 0.0
        self.log: list[tuple[str, int]] = []
        self.num_dispatched = 0

    def step(self) -> list[SequenceUpdate]:
        while len(self._in_flight) < self._max_steps_in_flight and (
            output := self.scheduler.schedule()
        ):
            self._in_flight.append((output, self._dispatch(output)))
        if not self._in_flight:
            return []
        output, handle = self._in_flight.popleft()
        return self.scheduler.commit(output, self._collect(handle))

    def _dispatch(self, output: SchedulerOutput) -> tuple[int, StepResult, float]:
        self.now_ms += HOST_MS / 2
        start_ms = max(self.now_ms, self._device_free_ms)
        if self.num_dispatched:
            self.device_idle_ms += start_ms - self._device_free_ms
        self._device_free_ms = start_ms + STEP_MS
        self.num_dispatched += 1
        self.log.append(("dispatch", self.num_dispatched))
        return self.num_dispatched, self._device.run(output), self._device_free_ms

    def _collect(self, handle: tuple[int, StepResult, float]) -> StepResult:
        number, result, done_ms = handle
        self.now_ms = max(self.now_ms, done_ms) + HOST_MS / 2
        self.log.append(("collect", number))
        return result


def run(max_steps_in_flight: int, num_sequences: int = 4) -> TimedEngine:
    engine = TimedEngine(max_steps_in_flight)
    sequences = [
        make_sequence(f"r{seed}", 4, NUM_TOKENS, seed=seed) for seed in range(num_sequences)
    ]
    for sequence in sequences:
        engine.scheduler.add(sequence)
    while engine.scheduler.has_unfinished:
        engine.step()
        engine.scheduler.check_invariants()
    for sequence in sequences:
        assert sequence.token_ids[4:] == expected_output(sequence)[0]
    return engine


@pytest.mark.parametrize("max_steps_in_flight", [2, 3])
def test_the_next_step_is_dispatched_before_the_last_one_is_read(max_steps_in_flight):
    engine = run(max_steps_in_flight)
    num_ahead = max_steps_in_flight - 1
    for number in range(1, engine.num_dispatched - num_ahead + 1):
        dispatched = engine.log.index(("dispatch", number + num_ahead))
        assert dispatched < engine.log.index(("collect", number))


def test_with_one_step_in_flight_each_is_read_before_the_next():
    engine = run(1)
    for number in range(1, engine.num_dispatched):
        collected = engine.log.index(("collect", number))
        assert collected < engine.log.index(("dispatch", number + 1))


def test_the_hosts_time_is_hidden_behind_the_device():
    engine = run(2)
    assert engine.num_dispatched == NUM_TOKENS
    assert engine.device_idle_ms == 0
    assert engine.now_ms == NUM_TOKENS * STEP_MS + HOST_MS


def test_with_one_step_in_flight_the_device_waits_for_the_host():
    engine = run(1)
    assert engine.now_ms == NUM_TOKENS * (STEP_MS + HOST_MS)


def test_no_surplus_step_runs_when_lengths_are_known():
    assert run(3, num_sequences=1).num_dispatched == NUM_TOKENS


def test_an_end_that_only_the_device_knows_costs_at_most_the_steps_ahead():
    engine = TimedEngine(3)
    seed = next(s for s in range(99) if len(expected_output(_ending(s))[0]) < NUM_TOKENS // 2)
    sequence = _ending(seed)
    engine.scheduler.add(sequence)
    updates = []
    while engine.scheduler.has_unfinished:
        updates += engine.step()
    expected = expected_output(sequence)[0]
    assert [token for update in updates for token in update.new_token_ids] == expected
    assert engine.num_dispatched == len(expected) + 2
    assert engine._device.num_frozen_rows == 2


def _ending(seed: int):
    return make_sequence("r", 4, NUM_TOKENS, seed=seed, ignore_eos=False)
