"""Policies keep their promises over thousands of requests, on a virtual clock."""

import dataclasses
import functools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.policy_simulation import Served, VirtualClock, simulate
from benchmarks.policy_traces import bursts, mixed, steady
from jaxserve.request import Sequence, SequenceStatus
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.policies import (
    POLICIES,
    FirstComeFirstServed,
    Policy,
    PriorityFirst,
    ServiceGoals,
    ShortestFirst,
)
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.step import SchedulerOutput
from tests.jaxserve.scheduler_builders import commit, expected_output, make_sequence, sizes
from tests.jaxserve.simulated_engine import SimulatedEngine

NUM_REQUESTS = 1000


def overtakings(served: list[Served]) -> tuple[np.ndarray, np.ndarray]:
    """Who got a slot (second) while who had come earlier was waiting (first); indices of pairs."""
    arrivals = np.array([one.request.arrival_seconds for one in served])
    starts = np.array([one.scheduled_seconds for one in served])
    came_first = arrivals[:, None] < arrivals[None, :]
    earlier, later = np.nonzero(came_first & (starts[:, None] > starts[None, :]))
    return earlier, later


def share_of_goals(served: list[Served], kind: str) -> float:
    return float(np.mean([one.has_met_goals for one in served if one.request.kind == kind]))


def percentile(served: list[Served], name: str, percent: float, kind: str) -> float:
    values = [getattr(one, name) for one in served if one.request.kind == kind]
    return float(np.percentile(values, percent))


@functools.cache
def serve_mixed(policy: Policy) -> list[Served]:
    """Chats with goals of 0.5 s and 50 ms, and documents of a heavy tail with one of 15 s."""
    return simulate(mixed(NUM_REQUESTS, rate=21.0, seed=3), policy)


def test_slo_holds_its_goals_where_fcfs_breaks_them():
    slo, fcfs = serve_mixed(ServiceGoals()), serve_mixed(FirstComeFirstServed())
    assert share_of_goals(slo, "chat") > 0.99 and share_of_goals(slo, "document") > 0.99
    assert share_of_goals(fcfs, "chat") < 0.5
    assert percentile(fcfs, "ttft_seconds", 99, "chat") > 2 * 0.5
    assert percentile(fcfs, "tpot_seconds", 99, "chat") > 2 * 0.05


def test_slo_uses_the_goals_of_the_policy_for_requests_without_any():
    trace = [
        dataclasses.replace(one, ttft_goal_seconds=None, tpot_goal_seconds=None)
        for one in mixed(400, rate=21.0, seed=3)
    ]
    fast, slow = (simulate(trace, ServiceGoals(tpot_goal_seconds=goal)) for goal in (0.03, 0.15))
    assert percentile(fast, "tpot_seconds", 99, "chat") < 0.03
    assert 0.03 < percentile(slow, "tpot_seconds", 99, "chat") < 0.15


def test_slo_still_meets_goals_of_half_the_requests_when_more_come_than_can_be_served():
    trace = steady(NUM_REQUESTS, rate=100.0)  # ten seconds of it, no more than late ones wait
    slo, by_deadline, fcfs = (
        share_of_goals(simulate(trace, policy), "chat")
        for policy in (
            ServiceGoals(),
            ServiceGoals(late_wait_seconds=0.0),
            FirstComeFirstServed(),
        )
    )
    assert slo > 0.5 and slo > 2 * by_deadline and slo > 2 * fcfs


def test_slo_never_lets_a_request_with_a_lost_goal_wait_past_its_bound():
    policy = ServiceGoals(late_wait_seconds=1.0)
    served = simulate(bursts(NUM_REQUESTS, rate=45.0), policy)
    earlier, later = overtakings(served)
    arrivals = np.array([one.request.arrival_seconds for one in served])
    goals = np.array([one.request.ttft_goal_seconds for one in served])
    bounds = goals + policy.late_wait_seconds
    gaps = arrivals[later] - arrivals[earlier]
    assert (gaps < bounds[earlier]).all()
    assert (gaps > goals[earlier]).any()  # some had lost their goals, and were put back


def test_shortest_first_never_lets_a_request_wait_past_its_bound():
    policy = ShortestFirst(ageing=100.0, max_wait_seconds=3.0)
    served = simulate(bursts(2000, rate=45.0), policy)
    arrivals = np.array([one.request.arrival_seconds for one in served])
    bounds = np.array([one.order_key[0] for one in served]) - arrivals
    earlier, later = overtakings(served)
    gaps = arrivals[later] - arrivals[earlier]
    assert (gaps < bounds[earlier]).all()
    assert gaps.size > 1000 and (gaps > 0.5 * bounds[earlier]).any()
    assert bounds.max() == pytest.approx(3.0) and bounds.min() < 1.0
    documents = np.array([one.request.kind == "document" for one in served])
    assert bounds[documents].min() > np.median(bounds[~documents])


def test_shortest_first_serves_chats_sooner_than_fcfs():
    shortest, fcfs = serve_mixed(ShortestFirst()), serve_mixed(FirstComeFirstServed())
    for percent in (50, 99):
        assert percentile(shortest, "ttft_seconds", percent, "chat") < 0.8 * percentile(
            fcfs, "ttft_seconds", percent, "chat"
        )


def test_priority_is_never_overtaken_by_a_larger_value_or_a_later_equal_one():
    served = serve_mixed(PriorityFirst())
    earlier, later = overtakings(served)
    priorities = np.array([one.request.priority for one in served])
    assert earlier.size > 100 and (priorities[earlier] > priorities[later]).all()


def test_fcfs_is_never_overtaken():
    assert overtakings(serve_mixed(FirstComeFirstServed()))[0].size == 0


def make_scheduler(
    policy: Policy,
    clock: VirtualClock,
    num_pages: int = 101,
    *,
    pools: tuple[PagePool, ...] = (),
    **limits,
) -> Scheduler:
    config = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
        "token_buckets": (16, 32, 64),
        "row_buckets": (4,),
        **limits,
    }
    pools = pools or (PagePool(num_pages, 4),)
    return Scheduler(SchedulerConfig(**config), pools, clock, policy)


def make_ranked(
    name: str, *lengths: int, seed: int = 0, arrival_seconds: float = 0.0, priority: int = 0
) -> Sequence:
    """A sequence with a place in the order."""
    sequence = make_sequence(name, *lengths, seed=seed)
    sequence.request = msgspec.structs.replace(
        sequence.request, arrival_seconds=arrival_seconds, priority=priority
    )
    return sequence


def schedule(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule()
    scheduler.check_invariants()
    assert output is not None
    return output


def test_a_long_prompt_halts_for_one_that_comes_before_it():
    scheduler = make_scheduler(PriorityFirst(), VirtualClock())
    scheduler.add(make_ranked("long", 200, priority=2))
    assert sizes(schedule(scheduler)) == {"long": 64}
    scheduler.add(make_ranked("after", 9, priority=3))
    scheduler.add(make_ranked("before", 20, priority=1))
    output = schedule(scheduler)
    assert sizes(output) == {"before": 20, "long": 44}
    assert [row.is_admission for row in output.rows] == [True, False]


def test_the_pages_of_a_running_prompt_are_not_given_to_one_that_comes_before_it():
    scheduler = make_scheduler(PriorityFirst(), VirtualClock(), num_pages=56)
    scheduler.add(make_ranked("long", 200, 1, priority=2))
    schedule(scheduler)
    scheduler.add(make_ranked("before", 24, 1, priority=1))
    assert sizes(schedule(scheduler)) == {"long": 64}
    scheduler.add(make_ranked("smaller", 20, 1, priority=0))
    commit(scheduler, scheduler._in_flight[0], [])
    assert sizes(schedule(scheduler)) == {"smaller": 20, "long": 44}


@pytest.mark.parametrize("num_pages, is_admitted", [(27, False), (28, True)])
def test_one_admitted_between_prompts_keeps_its_pages_for_the_rest_of_its_prompt(
    num_pages, is_admitted
):
    scheduler = make_scheduler(
        PriorityFirst(), VirtualClock(), num_pages, long_prefill_token_threshold=8
    )
    for name, num_prompt_tokens, priority in (("p5", 24, 5), ("p9", 24, 9)):  # 6 pages each
        scheduler.add(make_ranked(name, num_prompt_tokens, 1, priority=priority))
    assert sizes(schedule(scheduler)) == {"p5": 8, "p9": 8}
    for name, num_prompt_tokens, priority in (("w1", 40, 1), ("w7", 20, 7)):  # 10 and 5
        scheduler.add(make_ranked(name, num_prompt_tokens, 1, priority=priority))
    between = {"w7": 8} if is_admitted else {}
    assert sizes(schedule(scheduler)) == {"w1": 8, "p5": 8, **between, "p9": 8}


def test_the_sequence_with_the_largest_key_is_preempted():
    scheduler = make_scheduler(PriorityFirst(), VirtualClock(), num_pages=7)
    names = {"a": 2, "b": 3, "c": 1}
    sequences = {n: make_ranked(n, 8, 8, priority=priority) for n, priority in names.items()}
    for sequence in sequences.values():
        scheduler.add(sequence)
    commit(scheduler, schedule(scheduler), [7], [7], [7])
    assert sizes(schedule(scheduler)) == {"c": 1, "a": 1}
    waiting = [n for n, s in sequences.items() if s.status is not SequenceStatus.RUNNING]
    assert waiting == ["b"] and scheduler.num_preemptions == 1


def test_a_late_sequence_is_put_back_once():
    clock = VirtualClock()
    policy = ServiceGoals(ttft_goal_seconds=1.0, late_wait_seconds=5.0)
    scheduler = make_scheduler(policy, clock, max_num_seqs=1)
    scheduler.add(make_ranked("first", 4, 2))
    late = make_ranked("late", 4, 8, seed=1)
    scheduler.add(late)
    commit(scheduler, schedule(scheduler), [7])
    clock.now_seconds = 3.0
    in_time = make_ranked("in time", 4, 1, seed=2, arrival_seconds=2.5)
    scheduler.add(in_time)
    commit(scheduler, schedule(scheduler), [7])
    assert sizes(schedule(scheduler)) == {"in time": 4}
    assert late.order_key == (6.0, 1) and in_time.order_key == (3.5, 2)
    commit(scheduler, scheduler._in_flight[0], [7])
    clock.now_seconds = 99.0
    schedule(scheduler)
    assert late.order_key == (6.0, 1) and late.status is SequenceStatus.RUNNING


def test_a_sequence_that_had_a_slot_in_time_keeps_its_place_when_it_is_preempted():
    clock = VirtualClock()
    scheduler = make_scheduler(ServiceGoals(ttft_goal_seconds=1.0), clock)
    sequence = make_ranked("r", 4, 8)
    scheduler.add(sequence)
    commit(scheduler, schedule(scheduler), [7])
    scheduler._roster.preempt_last()
    clock.now_seconds = 99.0
    schedule(scheduler)
    assert sequence.order_key == (1.0, 0) and sequence.num_preemptions == 1


def test_an_aborted_sequence_says_nothing_about_how_long_outputs_are():
    clock = VirtualClock()
    scheduler = make_scheduler(ShortestFirst(), clock)
    costs = scheduler._order.costs
    expected = costs.sequence_seconds(0, 50)
    scheduler.add(make_ranked("aborted", 4, 8))
    commit(scheduler, schedule(scheduler), [7])
    scheduler.abort("aborted")
    assert costs.sequence_seconds(0, 50) == expected
    scheduler.add(make_ranked("ended", 4, 2))
    commit(scheduler, schedule(scheduler), [7])
    commit(scheduler, schedule(scheduler), [7])
    assert costs.sequence_seconds(0, 50) == pytest.approx(expected * 2 / 50)


def steps_of(policy: Policy, is_scrambled: bool) -> list[dict[str, int]]:
    """The steps of one crowded history, with or without all that policies look at."""
    random = np.random.default_rng(5)
    clock = VirtualClock()
    engine = SimulatedEngine(make_scheduler(policy, clock, num_pages=30))
    steps = []
    for index in range(30):
        lengths = random.integers(1, 60, 2).tolist()
        arrival, priority = random.uniform(0, 100), int(random.integers(-9, 9))
        if not is_scrambled:
            arrival, priority = 0.0, 0
        name = f"r{index}"
        engine.add(
            make_ranked(name, *lengths, seed=index, arrival_seconds=arrival, priority=priority)
        )
        for _ in range(int(random.integers(0, 4))):
            while (output := engine.dispatch()) is not None:
                steps.append(sizes(output))
            engine.collect()
            clock.now_seconds += 0.01
    engine.drain()
    assert engine.scheduler.num_preemptions > 5
    return steps


def test_fcfs_looks_at_nothing_but_the_order_of_addition():
    plain = steps_of(FirstComeFirstServed(), False)
    assert steps_of(FirstComeFirstServed(), True) == plain == steps_of(PriorityFirst(), False)
    assert steps_of(PriorityFirst(), True) != plain


@settings(max_examples=60, deadline=None, database=None)
@given(
    name=st.sampled_from(list(POLICIES)),
    num_pages=st.integers(8, 20),
    window=st.sampled_from([None, 5]),
    width=st.sampled_from([1, 1, 3]),
    max_steps_in_flight=st.integers(1, 3),
    threshold=st.sampled_from([0, 3, 16]),
    has_prefixes=st.booleans(),
    requests=st.lists(
        st.tuples(
            st.integers(1, 14),  # prompt tokens
            st.integers(1, 12),  # output tokens
            st.integers(-2, 2),  # priority
            st.floats(0, 3),  # seconds between arrival and addition
            st.integers(0, 3),  # steps before the next one is added
            st.integers(0, 9),  # 0 = then aborted
        ),
        min_size=1,
        max_size=12,
    ),
)
def test_every_policy_serves_everyone_the_right_tokens(
    name, num_pages, window, width, max_steps_in_flight, threshold, has_prefixes, requests
):
    clock = VirtualClock(10.0)
    pools = (PagePool(num_pages, 4), PagePool(num_pages * 2, 2, sliding_window=window))
    scheduler = make_scheduler(
        POLICIES[name](),
        clock,
        pools=pools,
        max_decode_row_tokens=width,
        max_steps_in_flight=max_steps_in_flight,
        long_prefill_token_threshold=threshold,
        max_num_batched_tokens=16,
        token_buckets=(4, 8, 16),
        enable_prefix_caching=has_prefixes,
    )
    engine = SimulatedEngine(scheduler, is_eager=False)
    for index, (num_prompt, num_output, priority, delay, num_steps, fate) in enumerate(requests):
        arrival = clock.now_seconds - delay
        lengths = (num_prompt, num_output)
        engine.add(
            make_ranked(
                f"r{index}", *lengths, seed=index, arrival_seconds=arrival, priority=priority
            )
        )
        for _ in range(num_steps):
            if engine.scheduler.has_unfinished:
                engine.step()
            clock.now_seconds += 0.3
        if fate == 0:
            engine.abort(f"r{index}")
    engine.drain()
    for index, (num_prompt, num_output, *_, fate) in enumerate(requests):
        expected = expected_output(make_sequence("", num_prompt, num_output, seed=index))[0]
        got = engine.output_of(f"r{index}")
        assert got == (expected if fate else expected[: len(got)])
