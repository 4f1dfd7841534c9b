"""Policies order by what they promise; costs and step times are learnt from what ran."""

import math

import numpy as np
import pytest

from jaxserve.errors import EngineConfigError
from jaxserve.scheduling.cost_model import (
    FIRST_OUTPUT_TOKEN_SECONDS,
    FIRST_PROMPT_TOKEN_SECONDS,
    CostModel,
)
from jaxserve.scheduling.policies import (
    POLICIES,
    DecodeLoad,
    FirstComeFirstServed,
    PriorityFirst,
    SequenceFacts,
    ServiceGoals,
    ShortestFirst,
)
from jaxserve.scheduling.step_time_model import StepShape, StepTimeModel

BUCKETS = (128, 256, 512, 1024, 2048)
TERMS = (4e-3, 2e-5, 1.5e-5, 3e-8)


def seconds_of(shape: StepShape) -> float:
    """What a step takes on a machine that is as the model says."""
    return float(np.dot(TERMS, (1, *shape)))


def random_shapes(count: int, seed: int = 0) -> list[StepShape]:
    """Steps, half of them without prompt tokens."""
    random = np.random.default_rng(seed)
    rows = random.integers(1, 256, count)
    prompts = random.integers(1, 8192, count) * random.integers(0, 2, count)
    contexts = rows * random.integers(100, 4000, count)
    return [StepShape(*map(int, shape)) for shape in zip(prompts, rows, contexts, strict=True)]


def learnt(shapes: list[StepShape], noise: float = 0.0, factor: float = 1.0) -> StepTimeModel:
    model, random = StepTimeModel(), np.random.default_rng(1)
    for shape in shapes:
        model.observe(shape, factor * seconds_of(shape) * (1 + noise * random.uniform(-1, 1)))
    return model


def largest_error(model: StepTimeModel, factor: float = 1.0) -> float:
    """Relative, over steps that it has not seen."""
    return max(
        abs(model.seconds(shape) / (factor * seconds_of(shape)) - 1)
        for shape in random_shapes(200, seed=9)
    )


def test_the_step_model_converges_to_the_times_of_the_machine():
    assert largest_error(learnt(random_shapes(2))) > 0.05
    assert largest_error(learnt(random_shapes(40))) < 1e-3
    assert largest_error(learnt(random_shapes(400), noise=0.2)) < 0.06
    assert learnt(random_shapes(400)).prompt_token_seconds == pytest.approx(2e-5, rel=1e-3)


def test_the_step_model_follows_a_machine_that_becomes_slower():
    model = learnt(random_shapes(300))
    assert largest_error(model, factor=3.0) > 0.6
    for shape in random_shapes(1600, seed=2):
        model.observe(shape, 3 * seconds_of(shape))
    assert largest_error(model, factor=3.0) < 0.01


def test_decode_steps_do_not_make_the_step_model_forget_what_prompts_take():
    model = learnt(random_shapes(100))
    for index in range(5000):
        shape = StepShape(0, 8, 8000 + index)
        model.observe(shape, seconds_of(shape))
    assert largest_error(model) < 1e-3


@pytest.mark.parametrize("seconds", [30.0, 1e-6])
def test_one_strange_step_hardly_moves_the_step_model(seconds):
    model = learnt(random_shapes(304))
    model.observe(StepShape(0, 100, 100_000), seconds)
    for shape in random_shapes(16, seed=3):
        model.observe(shape, seconds_of(shape))
    assert 1e-6 < largest_error(model) < 0.12


def test_the_step_model_is_never_negative_and_deterministic():
    shapes = [StepShape(prompt, 0, 0) for prompt in range(1000, 8000, 100)]
    first, second = StepTimeModel(), StepTimeModel()
    for model in (first, second):
        for shape in shapes:
            model.observe(shape, 1e-9 * shape.prompt_tokens**2)  # a line would start below 0
    assert first.seconds(StepShape(0, 0, 0)) == 0.0
    assert first.seconds(StepShape(2000, 3, 5)) == second.seconds(StepShape(2000, 3, 5)) > 0
    first.observe(StepShape(5000, 0, 0), 0.0)  # a clock that stood still
    assert first.seconds(StepShape(2000, 3, 5)) == second.seconds(StepShape(2000, 3, 5))


def test_costs_begin_with_known_rates_and_go_over_to_measured_ones():
    costs = CostModel()
    assert costs.sequence_seconds(1000, 50) == pytest.approx(
        1000 * FIRST_PROMPT_TOKEN_SECONDS + 50 * FIRST_OUTPUT_TOKEN_SECONDS
    )
    assert costs.first_token_seconds(0, 2) == 0
    shape = StepShape(0, 100, 100_000)
    for other in random_shapes(100):
        costs.observe_step(other, seconds_of(other))
    for _ in range(1500):
        costs.observe_step(shape, seconds_of(shape))
    assert costs.prefill_seconds(1000) == pytest.approx(1000 * 2e-5, rel=0.01)
    expected = 50 * seconds_of(shape) / 100
    assert costs.sequence_seconds(0, 50) == pytest.approx(expected, rel=0.01)
    assert costs.first_token_seconds(0, 2) == pytest.approx(2 * seconds_of(shape), rel=0.01)


def test_costs_expect_the_mean_output_but_never_more_than_max_tokens():
    costs = CostModel()
    for num_tokens in [20, 40] * 500:
        costs.observe_output(num_tokens)
    assert costs.sequence_seconds(0, 500) == pytest.approx(30 * FIRST_OUTPUT_TOKEN_SECONDS, rel=0.1)
    assert costs.sequence_seconds(0, 10) == pytest.approx(10 * FIRST_OUTPUT_TOKEN_SECONDS)


def test_fcfs_and_priority_look_at_nothing_else():
    facts = SequenceFacts(arrival_seconds=5.0, priority=3, total_seconds=9.0, ttft_goal_seconds=1.0)
    assert FirstComeFirstServed().key(facts) == ()
    assert PriorityFirst().key(facts) == (3,)
    assert FirstComeFirstServed().late_key(facts) is PriorityFirst().late_key(facts) is None


@pytest.mark.parametrize("ageing, expected", [(0.0, 7.0), (2.0, 8.0), (100.0, 12.0)])
def test_shortest_first_weighs_cost_against_arrival_up_to_a_limit(ageing, expected):
    policy = ShortestFirst(ageing=ageing, max_wait_seconds=5.0)
    assert policy.key(SequenceFacts(arrival_seconds=7.0, total_seconds=0.5)) == (expected,)


def test_slo_orders_by_deadline_and_puts_lost_goals_back():
    policy = ServiceGoals(ttft_goal_seconds=2.0, late_wait_seconds=10.0)
    facts = SequenceFacts(arrival_seconds=7.0, first_token_seconds=0.5)
    assert policy.key(facts) == (9.0,)
    late = policy.late_key(facts)
    assert (late.latest_start_seconds, late.key) == (8.5, (19.0,))
    assert policy.key(SequenceFacts(arrival_seconds=7.0, ttft_goal_seconds=0.25)) == (7.25,)


def load_of(*goals: float | None, num_rows: int = 10) -> DecodeLoad:
    return DecodeLoad(
        num_rows=num_rows,
        num_tokens=num_rows,
        num_context_tokens=10_000,
        tpot_goals_seconds=frozenset(goals),
    )


def test_slo_fills_the_largest_bucket_that_keeps_the_smallest_tpot_goal():
    policy = ServiceGoals(tpot_goal_seconds=0.02, headroom=0.0, min_prompt_tokens=1)
    model = learnt(random_shapes(100))
    for goal in (0.0075, 0.0125, 0.0175, 0.03, 0.1):
        room = policy.max_prompt_tokens(load_of(goal, 1.0), model, BUCKETS)
        assert room is not None and seconds_of(StepShape(room, 10, 10_000)) <= goal
        bigger = [bucket - 10 for bucket in BUCKETS if bucket - 10 > room][:1]
        assert all(seconds_of(StepShape(more, 10, 10_000)) > goal for more in bigger)
    rooms = [
        policy.max_prompt_tokens(load_of(*goals), model, BUCKETS)
        for goals in ((1.0,), (0.02, 1.0), (None,), (None, 1.0), (0.008, None))
    ]
    assert rooms == [2038, 502, 502, 502, 118]


def test_slo_keeps_a_share_of_the_goal_free():
    model, goal = learnt(random_shapes(100)), seconds_of(StepShape(1014, 10, 10_000)) * 1.02
    rooms = [
        ServiceGoals(headroom=headroom).max_prompt_tokens(load_of(goal), model, BUCKETS)
        for headroom in (0.0, 0.1)
    ]
    assert rooms == [1014, 502]


def test_slo_never_goes_below_its_floor_and_never_above_the_largest_step():
    policy, model = ServiceGoals(min_prompt_tokens=200), learnt(random_shapes(100))
    assert policy.max_prompt_tokens(load_of(1e-9), model, BUCKETS) == 246
    assert policy.max_prompt_tokens(load_of(1e-9, num_rows=60), model, BUCKETS) == 452
    assert policy.max_prompt_tokens(load_of(1e-9, num_rows=2000), model, BUCKETS) is None
    assert policy.max_prompt_tokens(load_of(9.0), StepTimeModel(), BUCKETS) == 246


@pytest.mark.parametrize(
    "policy, field, value",
    [
        (ShortestFirst, "ageing", -1.0),
        (ShortestFirst, "max_wait_seconds", math.nan),
        (ServiceGoals, "ttft_goal_seconds", -0.1),
        (ServiceGoals, "tpot_goal_seconds", -0.1),
        (ServiceGoals, "late_wait_seconds", -0.1),
        (ServiceGoals, "min_prompt_tokens", 0),
        (ServiceGoals, "headroom", 1.0),
    ],
)
def test_a_policy_refuses_values_that_make_no_sense(policy, field, value):
    with pytest.raises(EngineConfigError, match=f"^{field} must be .*; got {value}"):
        policy(**{field: value})


def test_users_name_the_policies():
    assert list(POLICIES) == ["fcfs", "priority", "shortest-first", "slo"]
    assert [policy().needs_estimates for policy in POLICIES.values()] == [False, False, True, True]
