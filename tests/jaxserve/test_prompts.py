"""Tests of jaxserve/processing/prompts.py that need no engine."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequestError
from jaxserve.processing.prompts import (
    ParsedPrompt,
    check_prompt_ids,
    list_conversations,
    list_params,
    list_prompts,
    parse_prompt,
)
from jaxserve.processing.request_options import RequestOptions
from jaxserve.sampling_params import SamplingParams
from tests.jaxserve.small_tokenizers import byte_level, words

MESSAGE = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("text", ["text"]),
        ({"prompt": "text"}, [{"prompt": "text"}]),
        ([1, np.int32(2)], [[1, np.int32(2)]]),
        (["a", [1], {"prompt": "b"}], ["a", [1], {"prompt": "b"}]),
        ([], []),
        ([[]], [[]]),
    ],
)
def test_one_prompt_or_many_become_a_list(prompts: Any, expected: list[Any]):
    assert list_prompts(prompts) == expected


def test_arrays_of_one_and_two_axes_are_one_prompt_and_many():
    assert len(list_prompts(np.arange(3))) == 1  # pyright: ignore[reportArgumentType]
    assert len(list_prompts(np.ones((2, 3), int))) == 2  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("prompts", [None, 5, {1, 2}, b"abc", np.array(3), iter([1])])
def test_what_is_no_list_of_prompts_is_refused(prompts: Any):
    with pytest.raises(InvalidRequestError, match="prompts must be text, token ids, a dict"):
        list_prompts(prompts)


@given(ids=st.lists(st.integers(0, 9), min_size=1, max_size=20))
def test_good_ids_come_back_as_plain_integers(ids: list[int]):
    for form in (ids, tuple(ids), np.array(ids, np.uint8), [np.int64(i) for i in ids]):
        checked = check_prompt_ids(form, 10)
        assert checked == tuple(ids)
        assert {type(token_id) for token_id in checked} == {int}


@given(
    ids=st.lists(st.integers(0, 9), max_size=20),
    bad=st.sampled_from([-1, 10, 2**70, True, 1.0, "1", None, [1]]),
    data=st.data(),
)
def test_one_bad_id_among_good_ones_is_found(ids: list[Any], bad: Any, data: st.DataObject):
    ids.insert(data.draw(st.integers(0, len(ids))), bad)
    with pytest.raises(InvalidRequestError, match=r"must hold integers in \[0, 10\)") as caught:
        check_prompt_ids(ids, 10)
    assert caught.value.value is bad


@pytest.mark.parametrize("ids", [[], (), np.array([], int)])
def test_at_least_one_id_is_needed(ids: Any):
    with pytest.raises(InvalidRequestError, match="must hold at least one id"):
        check_prompt_ids(ids, 10)


def test_text_is_encoded_and_kept():
    tokenizer = words()
    expected = ParsedPrompt((0, 1), "a b")
    assert parse_prompt("a b", tokenizer, 9) == parse_prompt({"prompt": "a b"}, tokenizer, 9)
    assert parse_prompt("a b", tokenizer, 9) == expected
    both = {"prompt": "a b", "prompt_token_ids": [1], "cache_salt": None}
    assert parse_prompt(both, tokenizer, 9) == ParsedPrompt((1,), "a b")


def test_a_dict_may_hold_what_the_prompt_asks_besides():
    options = {"cache_salt": "s", "timeout": 5, "ttft_goal_ms": 250, "tpot_goal_ms": None}
    expected = RequestOptions(cache_salt="s", timeout_seconds=5.0, ttft_goal_seconds=0.25)
    for prompt in ({"prompt": "a b"}, {"prompt_token_ids": [0, 1], "prompt": "a b"}):
        parsed = parse_prompt(prompt | options, words(), 9)
        assert parsed == ParsedPrompt((0, 1), "a b", expected)


def test_text_whose_ids_the_model_lacks_is_refused():
    with pytest.raises(InvalidRequestError, match=r"must hold integers in \[0, 1\); got 1"):
        parse_prompt("a b", words(), 1)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt must give at least one token; got ''"),
        ({}, "prompt must hold prompt or prompt_token_ids"),
        ({"promt": "a"}, "prompt must have no keys but .*; got 'promt'"),
        ({1: 2, "a": 3}, "prompt must have no keys but .*; got 1"),
        ({"prompt": 3}, "prompt must be text; got 3"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids must be a list of integers"),
        ({"prompt": "a", "multi_modal_data": {}}, "multi_modal_data is not supported"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt must be text of 1 to 1024 characters"),
        ({"prompt": "a", "timeout": 0}, "timeout must be greater than 0; got 0"),
        (3, "prompt must be text, a list of token ids, or a dict; got 3"),
        ("a \udc80", "text must be valid Unicode"),
    ],
)
def test_a_bad_prompt_is_refused_by_name(prompt: Any, message: str):
    with pytest.raises(InvalidRequestError, match=message):
        parse_prompt(prompt, byte_level(), 300)


def test_text_needs_a_tokenizer():
    with pytest.raises(InvalidRequestError, match="must be token ids when the engine has no token"):
        parse_prompt("a", None, 9)


def test_one_conversation_or_many_become_a_list():
    assert list_conversations([MESSAGE]) == [[MESSAGE]]
    assert list_conversations([[MESSAGE], [MESSAGE, MESSAGE]]) == [[MESSAGE], [MESSAGE, MESSAGE]]
    assert list_conversations([]) == []


@pytest.mark.parametrize("messages", ["a", MESSAGE, None, [[MESSAGE], MESSAGE], ["a"], [3]])
def test_what_is_no_conversation_is_refused(messages: Any):
    with pytest.raises(InvalidRequestError, match="messages must be a list of messages"):
        list_conversations(messages)


def test_params_are_for_all_or_for_each():
    first, second = SamplingParams(), SamplingParams(n=2)
    assert list_params(first, 3) == [first] * 3
    assert list_params([first, second], 2) == [first, second]
    assert list_params([], 0) == []
    with pytest.raises(InvalidRequestError, match="must be one, or one for each of 3 prompts"):
        list_params((first, second), 3)
    for wrong in ({}, None, "x", [None, first]):
        with pytest.raises(InvalidRequestError, match="sampling_params must"):
            list_params(wrong, 2)  # pyright: ignore[reportArgumentType]
