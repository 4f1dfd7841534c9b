"""Tests of jaxserve/sampling_params.py."""

import copy
import logging
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequestError, describe_value
from jaxserve.sampling_params import (
    BeamSearchParams,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    SamplingType,
    StructuredOutputsParams,
)

INT_RULES = {  # field: (lowest, allows None)
    "n": (1, False),
    "top_k": (-1, False),
    "seed": (-(2**63), True),
    "max_tokens": (1, True),
    "min_tokens": (0, False),
    "logprobs": (-1, True),
    "prompt_logprobs": (-1, True),
    "prompt_logprob_start": (0, True),
    "stream_interval": (1, True),
    "thinking_token_budget": (-1, True),
    "routed_experts_prompt_start": (0, False),
}
NUMBER_RULES = {  # field: (rule as shown, low, high, whether low itself is refused)
    "presence_penalty": ("in [-2, 2]", -2, 2, False),
    "frequency_penalty": ("in [-2, 2]", -2, 2, False),
    "repetition_penalty": ("greater than 0", 0, math.inf, True),
    "temperature": ("in [0, 2]", 0, 2, False),
    "top_p": ("in (0, 1]", 0, 1, True),
    "min_p": ("in [0, 1]", 0, 1, False),
}
FLAGS = [
    "ignore_eos",
    "flat_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
]
ID_LISTS = [
    "stop_token_ids",
    "logprob_token_ids",
    "prompt_logprob_token_ids",
    "allowed_token_ids",
    "trace_decode_token_ids",
]
ORDER = (
    "n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed "
    "stop stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs "
    "logprob_token_ids prompt_logprob_token_ids prompt_logprob_start flat_logprobs detokenize "
    "skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind "
    "stream_interval structured_outputs logit_bias allowed_token_ids bad_words extra_args "
    "skip_reading_prefix_cache thinking_token_budget repetition_detection watermarking "
    "trace_decode_token_ids routed_experts_prompt_start"
).split()


def make(name: str, value: Any) -> SamplingParams:
    """Make parameters of one field by its name."""
    return SamplingParams(**{name: value})


def refused(name: str, value: Any) -> InvalidRequestError:
    """Check that the field refuses the value, when made and when changed; return the error."""
    params = SamplingParams()
    setattr(params, name, value)
    with pytest.raises(InvalidRequestError):
        params.verify()
    with pytest.raises(InvalidRequestError) as caught:
        make(name, value)
    assert caught.value.parameter == name
    return caught.value


def test_fields_stand_in_vllms_order_with_its_defaults():
    assert SamplingParams.__struct_fields__ == tuple(ORDER)
    params = SamplingParams(1, 0.0, 0.0, 1.0, 0.5, 0.9, 40)
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 40)
    default = SamplingParams()
    assert (default.n, default.temperature, default.max_tokens) == (1, 1.0, 16)
    assert (default.stop, default.stop_token_ids, default.bad_words) == ([], [], [])
    assert default.output_kind is RequestOutputKind.CUMULATIVE


@given(st.sampled_from(sorted(INT_RULES)), st.integers())
def test_integers_are_taken_in_their_range_and_refused_outside(name, value):
    low, _ = INT_RULES[name]
    if name == "n" and value >= 1:
        assert make(name, value if value < 2**63 else 5).n >= 1
    elif value < low:
        assert str(refused(name, value)).startswith(f"{name} must be at least {low}; got ")
    elif value < 2**63 and not (name == "min_tokens" and value > 16):
        expected = None if value == -1 and name in ("seed", "thinking_token_budget") else value
        assert getattr(make(name, value), name) == expected


@pytest.mark.parametrize("name", INT_RULES)
@pytest.mark.parametrize(
    "value",
    [True, False, 1.0, math.nan, "1", [1], 2**63, 10**5000, np.bool_(True)],
    ids=describe_value,
)
def test_integers_refuse_all_that_is_none(name, value):
    if value is True and name in ("logprobs", "prompt_logprobs"):
        assert getattr(make(name, value), name) == 1
        return
    assert str(refused(name, value)).startswith(f"{name} must be ")


@pytest.mark.parametrize(("name", "rule"), INT_RULES.items())
def test_only_optional_integers_take_none(name, rule):
    if rule[1]:
        assert getattr(make(name, None), name) is None
    else:
        refused(name, None)


@given(st.sampled_from(sorted(NUMBER_RULES)), st.floats(-4, 4))
def test_numbers_are_taken_in_their_range_and_refused_outside(name, value):
    rule, low, high, is_low_open = NUMBER_RULES[name]
    if value < low or value > high or (is_low_open and value == low):
        assert str(refused(name, value)) == f"{name} must be {rule}; got {value!r}"
    elif not (name == "temperature" and value < 0.01):
        assert getattr(make(name, value), name) == value


@pytest.mark.parametrize("name", NUMBER_RULES)
@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, 10**400, -(10**5000), True, "1", None, [1.0], 1j],
    ids=describe_value,
)
def test_numbers_refuse_what_is_not_a_finite_number(name, value):
    assert str(refused(name, value)).startswith(f"{name} must be a ")


def test_the_style_of_a_message():
    assert str(refused("top_p", 0.0)) == "top_p must be in (0, 1]; got 0.0"
    assert str(refused("max_tokens", 0)) == "max_tokens must be at least 1; got 0"


def test_numbers_of_numpy_become_plain_ones():
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(4))  # type: ignore[arg-type]
    assert type(params.temperature) is float
    assert type(params.top_k) is int


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [None, 0, 1, "true", 1.0])
def test_flags_refuse_all_but_true_and_false(name, value):
    assert str(refused(name, value)).startswith(f"{name} must be True or False; got ")


@given(st.floats(0, 0.01, exclude_min=True, exclude_max=True))
def test_a_tiny_temperature_is_raised(temperature):
    assert SamplingParams(temperature=temperature).temperature == 0.01


def test_a_raised_temperature_gives_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        SamplingParams(temperature=0.001)
    assert "temperature 0.001 is raised to 0.01" in caplog.text


def test_greedy_switches_the_filters_off_whenever_it_is_chosen():
    params = SamplingParams(temperature=0.0, top_p=0.5, top_k=3, min_p=0.1)
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    params = SamplingParams(top_p=0.5, top_k=3)
    params.temperature = 0
    params.verify()
    assert (params.top_p, params.top_k) == (1.0, 0)


def test_greedy_allows_one_sequence_only():
    with pytest.raises(InvalidRequestError, match="n must be 1 when temperature is 0; got 2"):
        SamplingParams(n=2, temperature=0)


def test_greedy_does_not_hide_a_wrong_filter():
    with pytest.raises(InvalidRequestError, match="top_p"):
        SamplingParams(temperature=0, top_p=7)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"temperature": 0.0, "seed": 3}, SamplingType.GREEDY),
        ({}, SamplingType.RANDOM),
        ({"seed": -1}, SamplingType.RANDOM),
        ({"seed": 0}, SamplingType.RANDOM_SEED),
    ],
)
def test_sampling_type_follows_temperature_and_seed(fields, kind):
    params = SamplingParams(**fields)
    assert params.sampling_type is kind
    assert params.is_greedy is (kind is SamplingType.GREEDY)


@pytest.mark.parametrize(
    ("given_stop", "stop"), [(None, []), ("a", ["a"]), (["a", "b"], ["a", "b"]), (("a",), ["a"])]
)
def test_stop_becomes_a_list(given_stop, stop):
    params = SamplingParams(stop=given_stop)
    assert params.stop == stop
    assert params.stop_strings == tuple(stop)


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [1], [None], 1, {"a": 1}, b"a"])
def test_stop_refuses_what_is_no_list_of_strings(stop):
    refused("stop", stop)


def test_stop_needs_text():
    with pytest.raises(InvalidRequestError, match="stop must be empty when detokenize is False"):
        SamplingParams(stop="a", detokenize=False)


@pytest.mark.parametrize("name", ID_LISTS)
@pytest.mark.parametrize("value", [[-1], [True], [1.0], ["1"], [2**31], "12", 3, {1}])
def test_token_ids_are_lists_of_ids(name, value):
    assert getattr(make(name, [3]), name) == [3]
    refused(name, value)


@given(st.lists(st.integers(0, 20)))
def test_stop_token_ids_lose_their_repeats_and_keep_their_order(ids):
    params = SamplingParams(stop_token_ids=ids)
    assert params.stop_token_ids == sorted(set(ids), key=ids.index)
    assert params.all_stop_token_ids == set(ids)


def test_an_empty_allowed_list_is_refused():
    refused("allowed_token_ids", [])


def test_min_tokens_is_at_most_max_tokens():
    with pytest.raises(InvalidRequestError, match="at most max_tokens=5; got 6"):
        SamplingParams(max_tokens=5, min_tokens=6)
    assert SamplingParams(max_tokens=None, min_tokens=600).min_tokens == 600


def test_logprob_token_ids_agree_with_logprobs():
    assert SamplingParams(logprob_token_ids=[1, 2], logprobs=2).logprobs == 2
    with pytest.raises(InvalidRequestError, match="logprobs must equal .* 2; got 3"):
        SamplingParams(logprob_token_ids=[1, 2], logprobs=3)
    with pytest.raises(InvalidRequestError, match="at most 128 ids; got 129"):
        SamplingParams(logprob_token_ids=list(range(129)))


def test_prompt_logprobs_skip_the_prefix_cache_unless_told_otherwise():
    assert SamplingParams().skip_reading_prefix_cache is None
    assert SamplingParams(prompt_logprobs=1).skip_reading_prefix_cache is True
    params = SamplingParams(prompt_logprobs=1, skip_reading_prefix_cache=False)
    assert params.skip_reading_prefix_cache is False
    refused("skip_reading_prefix_cache", 1)


def test_logit_bias_takes_ids_written_as_text():
    assert SamplingParams(logit_bias={"7": 1, 8: -2.5}).logit_bias == {7: 1.0, 8: -2.5}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "value", [[1], {"x": 1}, {-1: 1}, {"-1": 1}, {1: math.nan}, {1: "2"}, {True: 1}, {"9" * 99: 1}]
)
def test_logit_bias_refuses_wrong_entries(value):
    refused("logit_bias", value)


def test_bad_words_lose_repeats_and_refuse_empty_words():
    assert SamplingParams(bad_words=["a", "a", "b"]).bad_words == ["a", "b"]
    refused("bad_words", ["a", ""])
    refused("bad_words", "word")


@pytest.mark.parametrize("name", ["extra_args", "watermarking"])
def test_free_dictionaries_hold_64_bit_integers_in_64_levels(name):
    assert getattr(make(name, {"a": [1, {"b": "c"}]}), name) == {"a": [1, {"b": "c"}]}
    deep: dict[str, Any] = {}
    for _ in range(64):
        deep = {"a": deep}
    for value in [{"a": [2**63]}, deep, [1], "a"]:
        refused(name, value)


@pytest.mark.parametrize(
    "name", ["structured_outputs", "repetition_detection", "output_kind", "extra_args"]
)
def test_companions_must_be_of_their_type(name):
    refused(name, "json")


def test_an_unknown_argument_is_refused_by_its_name():
    for name in ("best_of", "logits_processors", "truncate_prompt_tokens", "use_beam_search"):
        with pytest.raises(TypeError, match=name):
            make(name, 1)


def test_from_optional_reads_none_as_not_given():
    params = SamplingParams.from_optional(
        n=None, temperature=None, top_p=0.5, stop=None, max_tokens=None, min_tokens=None
    )
    assert params == SamplingParams(top_p=0.5, max_tokens=None)
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams.from_optional(best_of=2)


def test_from_optional_clamps_logit_bias():
    params = SamplingParams.from_optional(logit_bias={"1": 500, 2: -500, 3: 7})
    assert params.logit_bias == {1: 100.0, 2: -100.0, 3: 7.0}
    with pytest.raises(InvalidRequestError):
        SamplingParams.from_optional(logit_bias={1: math.inf})


def test_a_clone_shares_nothing_that_can_change():
    params = SamplingParams(stop=["a"], stop_token_ids=[1], extra_args={"a": [1]})
    clone = params.clone()
    assert clone == params
    before = copy.deepcopy(clone)
    for value in (params.stop, params.stop_token_ids):
        assert isinstance(value, list)
        value.clear()
    assert params.extra_args is not None
    params.extra_args["a"].append(2)
    assert clone == before


def test_the_clients_own_list_is_not_kept():
    ids = [1, 2]
    params = SamplingParams(stop_token_ids=ids)
    ids.append(-5)
    assert params.stop_token_ids == [1, 2]


def test_parameters_travel_as_msgpack():
    params = SamplingParams(
        n=2,
        stop="a",
        seed=2**63 - 1,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=StructuredOutputsParams(json={"type": "object"}),
    )
    frame = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(frame, type=SamplingParams) == params


def test_a_frame_with_wrong_values_is_refused():
    for fields in ({"top_p": 7.0}, {"n": "1"}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=SamplingParams)


def test_repr_shows_only_what_was_chosen():
    assert repr(SamplingParams(top_p=0.5)) == "SamplingParams(top_p=0.5)"


@pytest.mark.parametrize(
    "fields", [{}, {"json": "{}", "regex": "a"}, {"json_object": True, "choice": ["a"]}]
)
def test_structured_outputs_take_exactly_one_kind(fields):
    with pytest.raises(InvalidRequestError, match="exactly one of"):
        StructuredOutputsParams(**fields)


@pytest.mark.parametrize("json", ["{", "[" * 100 + "]" * 100, "[" * 100_000])
def test_a_schema_is_valid_json_of_at_most_64_levels(json):
    assert StructuredOutputsParams(json='{"type": "object"}').json == '{"type": "object"}'
    with pytest.raises(InvalidRequestError, match="json must"):
        StructuredOutputsParams(json=json)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_pattern_size": 3, "min_count": 1},
        {"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2},
        {"max_pattern_size": -1},
        {"max_pattern_size": True, "min_count": 2},
    ],
)
def test_repetition_detection_checks_its_sizes(fields):
    assert RepetitionDetectionParams(max_pattern_size=3, min_count=2).min_count == 2
    with pytest.raises(InvalidRequestError):
        RepetitionDetectionParams(**fields)


@pytest.mark.parametrize(
    "fields",
    [{"beam_width": 0}, {"max_tokens": 0}, {"temperature": 3}, {"length_penalty": math.nan}],
)
def test_beam_search_checks_its_fields(fields):
    good: dict[str, Any] = {"beam_width": 4, "max_tokens": 8}
    assert BeamSearchParams(**good).beam_width == 4
    with pytest.raises(InvalidRequestError, match=next(iter(fields))):
        BeamSearchParams(**{**good, **fields})
