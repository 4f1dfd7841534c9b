"""What of the operator's settings the plan hands to the scheduler."""

from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.execution.engine_plan import make_policy, scheduler_config
from jaxserve.plan_report import report_plan
from jaxserve.scheduling.policies import POLICIES, ServiceGoals
from tests.tiny_llm import MODEL, SETTINGS


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_made_by_its_name_with_its_own_defaults(name: str):
    assert make_policy(EngineConfig(scheduling_policy=name)) == POLICIES[name]()


def test_goals_are_those_of_requests_that_name_none():
    config = EngineConfig(scheduling_policy="slo", ttft_goal_ms=250, tpot_goal_ms=12.5)
    expected = ServiceGoals(ttft_goal_seconds=0.25, tpot_goal_seconds=0.0125)
    assert make_policy(config) == expected
    config = EngineConfig(scheduling_policy="slo", tpot_goal_ms=20)
    assert make_policy(config) == ServiceGoals(tpot_goal_seconds=0.02)


@pytest.mark.parametrize("seconds", [None, 2.5])
def test_the_limit_of_waiting_reaches_the_scheduler(seconds: Any):
    report = report_plan(EngineConfig(model=MODEL, max_queue_time=seconds, **SETTINGS))
    made = scheduler_config(report.setup, report.plan.limits, report.plan.buckets)
    assert made.max_queue_seconds == seconds
