"""Tests of jaxserve/processing/sampling_limits.py."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequestError, RequestTooLongError
from jaxserve.processing.sampling_limits import (
    SamplingLimits,
    refuse_unsupported,
    resolve_sampling_params,
)
from jaxserve.sampling_params import (
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)

LIMITS = SamplingLimits(vocab_size=100, max_model_len=50)

UNSUPPORTED: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "prompt_logprobs": 0,
    "logprob_token_ids": [1],
    "prompt_logprob_token_ids": [1],
    "prompt_logprob_start": 0,
    "flat_logprobs": True,
    "structured_outputs": StructuredOutputsParams(regex="a+"),
    "logit_bias": {1: 1.0},
    "allowed_token_ids": [1],
    "bad_words": ["word"],
    "extra_args": {"a": 1},
    "thinking_token_budget": 0,
    "repetition_detection": RepetitionDetectionParams(max_pattern_size=2, min_count=2),
    "watermarking": {"key": 1},
    "trace_decode_token_ids": [1],
    "routed_experts_prompt_start": 1,
}


def resolve(num_prompt_tokens: int = 10, **fields: Any) -> SamplingParams:
    return resolve_sampling_params(
        SamplingParams(**fields), LIMITS, num_prompt_tokens=num_prompt_tokens
    )


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED.items())
def test_what_the_engine_does_not_do_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequestError) as caught:
        resolve(**{name: value})
    assert str(caught.value).startswith(f"{name} is not supported in this release; got ")
    assert caught.value.parameter == name


def test_all_logprobs_are_refused():
    with pytest.raises(InvalidRequestError, match="logprobs of all tokens is not supported"):
        resolve(logprobs=-1)


def test_values_that_ask_nothing_are_accepted():
    neutral: dict[str, Any] = {
        "presence_penalty": 0,
        "repetition_penalty": 1,
        "logit_bias": {},
        "bad_words": [],
        "extra_args": {},
        "thinking_token_budget": -1,
        "repetition_detection": RepetitionDetectionParams(),
        "routed_experts_prompt_start": 0,
        "skip_reading_prefix_cache": True,
    }
    assert resolve(**neutral).max_tokens == 16


def test_every_field_is_either_applied_or_refused():
    applied = {
        "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids",
        "ignore_eos", "max_tokens", "min_tokens", "logprobs", "detokenize",
        "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
        "output_kind", "stream_interval", "skip_reading_prefix_cache",
    }  # fmt: skip
    assert applied | set(UNSUPPORTED) == set(SamplingParams.__struct_fields__)
    assert not applied & set(UNSUPPORTED)


def test_refusal_reads_fields_changed_after_construction():
    params = SamplingParams()
    params.presence_penalty = 0.5
    with pytest.raises(InvalidRequestError, match="presence_penalty is not supported"):
        refuse_unsupported(params)


@given(
    st.integers(1, 60),
    st.none() | st.integers(1, 60),
    st.integers(0, 60),
)
def test_max_tokens_is_what_was_asked_or_the_room_left(num_prompt_tokens, max_tokens, min_tokens):
    if max_tokens is not None and min_tokens > max_tokens:
        return
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens)
    room = LIMITS.max_model_len - num_prompt_tokens
    if room < 1 or (max_tokens or 0) > room:
        with pytest.raises(RequestTooLongError):
            resolve_sampling_params(params, LIMITS, num_prompt_tokens=num_prompt_tokens)
    elif min_tokens > room:
        with pytest.raises(InvalidRequestError, match="min_tokens must be at most"):
            resolve_sampling_params(params, LIMITS, num_prompt_tokens=num_prompt_tokens)
    else:
        resolved = resolve_sampling_params(params, LIMITS, num_prompt_tokens=num_prompt_tokens)
        assert resolved.max_tokens == (room if max_tokens is None else max_tokens)
        assert params.max_tokens == max_tokens


def test_a_request_too_long_says_by_how_much_and_what_to_do():
    with pytest.raises(RequestTooLongError) as caught:
        resolve(num_prompt_tokens=40, max_tokens=11)
    assert str(caught.value) == (
        "prompt and max_tokens need 51 tokens, but this model holds 50; "
        "shorten the prompt or lower max_tokens"
    )
    with pytest.raises(RequestTooLongError, match="maximum context length is 50 tokens. However"):
        resolve(num_prompt_tokens=50)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("n", 128, 129),
        ("logprobs", 20, 21),
        ("stop", ["a"] * 16, ["a"] * 17),
        ("stop", ["a" * 256], ["a" * 257]),
        ("stop_token_ids", [99], [100]),
    ],
)
def test_limits_hold_at_their_edge(name, good, bad):
    assert getattr(resolve(**{name: good}), name) == (good if isinstance(good, int) else list(good))
    with pytest.raises(InvalidRequestError) as caught:
        resolve(**{name: bad})
    assert caught.value.parameter == name


def test_limits_can_be_raised():
    limits = SamplingLimits(vocab_size=100, max_model_len=50, max_n=500, max_logprobs=50)
    params = SamplingParams(n=500, logprobs=50)
    assert resolve_sampling_params(params, limits, num_prompt_tokens=1) == params


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_p", 0.0), ("n", True), ("stop", [""]), ("stop_token_ids", [-1]), ("max_tokens", 0)],
)
def test_a_field_changed_to_a_wrong_value_is_found_when_the_request_is_added(name, value):
    params = SamplingParams()
    setattr(params, name, value)
    with pytest.raises(InvalidRequestError) as caught:
        resolve_sampling_params(params, LIMITS, num_prompt_tokens=1)
    assert caught.value.parameter == name


def test_a_stop_set_to_a_string_later_is_read_as_one_string():
    params = SamplingParams()
    params.stop = "END"
    assert resolve_sampling_params(params, LIMITS, num_prompt_tokens=1).stop == ["END"]


def test_later_changes_of_the_original_do_not_reach_the_copy():
    params = SamplingParams(stop=["a"], stop_token_ids=[1])
    resolved = resolve_sampling_params(params, LIMITS, num_prompt_tokens=1)
    before = copy.deepcopy(resolved)
    params.temperature, params.n = 0.3, 7
    for value in (params.stop, params.stop_token_ids):
        assert isinstance(value, list)
        value.clear()
    assert resolved == before
