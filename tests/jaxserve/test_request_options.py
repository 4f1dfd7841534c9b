"""Tests of jaxserve/processing/request_options.py."""

import math
from fractions import Fraction
from typing import Any

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.processing.request_options import (
    NO_OPTIONS,
    RequestOptions,
    check_policy_fields,
    list_priorities,
)
from jaxserve.scheduling.policies import POLICIES


def test_goals_are_given_in_milliseconds_and_kept_in_seconds():
    options = RequestOptions.from_fields(
        cache_salt="é", timeout=Fraction(1, 2), ttft_goal_ms=100, tpot_goal_ms=0.001
    )
    assert options == RequestOptions(
        cache_salt="é", timeout_seconds=0.5, ttft_goal_seconds=0.1, tpot_goal_seconds=1e-6
    )
    assert RequestOptions.from_fields() == NO_OPTIONS


SALT_RULE = "cache_salt must be text of 1 to 1024 characters; got "


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("cache_salt", "", f"{SALT_RULE}''"),
        ("cache_salt", 5, f"{SALT_RULE}5"),
        ("cache_salt", b"salt", f"{SALT_RULE}b'salt'"),
        ("cache_salt", "x" * 1025, f"{SALT_RULE}'xxx"),
        ("cache_salt", "a\udc80", f"{SALT_RULE}'a\\udc80'"),
        ("timeout", 0, "timeout must be greater than 0; got 0"),
        ("timeout", -0.5, "timeout must be greater than 0; got -0.5"),
        ("timeout", math.inf, "timeout must be a finite number; got inf"),
        ("timeout", math.nan, "timeout must be a finite number; got nan"),
        ("timeout", 10**400, "timeout must be a finite number; got 1"),
        ("timeout", True, "timeout must be a number; got True"),
        ("timeout", "5", "timeout must be a number; got '5'"),
        ("ttft_goal_ms", 0, "ttft_goal_ms must be at least 0.001; got 0"),
        ("tpot_goal_ms", 5e-324, "tpot_goal_ms must be at least 0.001; got 5e-324"),
        ("tpot_goal_ms", math.inf, "tpot_goal_ms must be a finite number; got inf"),
    ],
)
def test_a_value_that_breaks_its_rule_is_refused_in_a_sentence(name: str, value: Any, message: str):
    with pytest.raises(InvalidRequestError) as caught:
        RequestOptions.from_fields(**{name: value})
    assert str(caught.value).startswith(message) and len(str(caught.value)) < 300
    assert caught.value.parameter == name


def test_what_is_given_above_goes_over_what_is_given_below():
    below = RequestOptions(cache_salt="below", timeout_seconds=9.0, ttft_goal_seconds=2.0)
    above = RequestOptions(cache_salt="above", tpot_goal_seconds=0.5)
    assert above.over(below) == RequestOptions(
        cache_salt="above", timeout_seconds=9.0, ttft_goal_seconds=2.0, tpot_goal_seconds=0.5
    )
    assert NO_OPTIONS.over(below) == below and below.over(NO_OPTIONS) == below


def test_a_priority_is_for_all_or_for_each():
    assert list_priorities(None, 2) == [0, 0]
    assert list_priorities(-3, 2) == [-3, -3]
    assert list_priorities([4, -(2**63)], 2) == [4, -(2**63)]
    assert list_priorities((), 0) == []


@pytest.mark.parametrize(
    ("priority", "message"),
    [
        ([1], "priority must be one integer, or one for each of 2 prompts; got 1"),
        ([1, 2.0], "priority must be an integer; got 2.0"),
        ([1, None], "priority must be an integer; got None"),
        (True, "priority must be an integer; got True"),
        ("12", "priority must be an integer; got '12'"),
        (2**63, f"priority must be at most {2**63 - 1}; got {2**63}"),
    ],
)
def test_what_is_no_priority_is_refused(priority: Any, message: str):
    with pytest.raises(InvalidRequestError) as caught:
        list_priorities(priority, 2)
    assert str(caught.value) == message


POLICY_CASES = [
    ({}, 3, "priority must be 0 under the scheduling policy {}; got 3; it needs", "priority"),
    ({"ttft_goal_ms": 250}, 0, "ttft_goal_ms must not be given under .* {}; got 250", "slo"),
    ({"tpot_goal_ms": 12.5}, 0, "tpot_goal_ms must not be given under .* {}; got 12.5", "slo"),
]


@pytest.mark.parametrize(("fields", "priority", "message", "needed"), POLICY_CASES)
def test_what_a_policy_does_not_go_by_is_refused_under_it(fields, priority, message, needed):
    options = RequestOptions.from_fields(timeout=5, cache_salt="s", **fields)
    check_policy_fields(options, priority, needed)
    for policy in POLICIES.keys() - {needed}:
        with pytest.raises(InvalidRequestError, match=message.format(policy)) as caught:
            check_policy_fields(options, priority, policy)
        assert caught.value.parameter in (*fields, "priority")
        assert f"scheduling_policy='{needed}'" in str(caught.value)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_asks_nothing_of_a_policy_is_taken_by_all(policy):
    check_policy_fields(RequestOptions.from_fields(timeout=5, cache_salt="s"), 0, policy)
