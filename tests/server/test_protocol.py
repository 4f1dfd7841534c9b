"""Requests of both kinds: every field of vLLM's is applied, or refused by name."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

import server
from jaxserve.errors import InvalidRequestError
from jaxserve.processing.request_options import NO_OPTIONS, RequestOptions
from jaxserve.sampling_params import SamplingParams
from server.protocol.chat import chat_options, chat_sampling_params, decode_chat_request
from server.protocol.completion import (
    CompletionRequest,
    completion_sampling_params,
    decode_completion_request,
    list_prompts,
)
from server.protocol.sampling import make_request_options
from server.protocol.typed_body import ignored_fields_header

DEFAULTS = SamplingParams()
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any):
    return decode_chat_request({"messages": MESSAGES, **fields})[0]


def completion(**fields: Any):
    return decode_completion_request({"prompt": "hi", **fields})[0]


def refused(decode: Any, name: str, **fields: Any) -> str:
    """The message with which fields are refused, which must be for the name."""
    with pytest.raises(InvalidRequestError) as caught:
        request = decode(**fields)
        is_completion = isinstance(request, CompletionRequest)
        make = completion_sampling_params if is_completion else chat_sampling_params
        make(request, DEFAULTS)
        make_request_options(request)
        chat_options(request)
    assert caught.value.parameter == name, str(caught.value)
    return str(caught.value)


REFUSED_EVERYWHERE: dict[str, Any] = {
    "truncate_prompt_tokens": -1,
    "truncation_side": "left",
    "length_penalty": 0.5,
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"},
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "a",
    "mm_processor_kwargs": {"a": 1},
    "kv_transfer_params": {"a": 1},
    "best_of": 2,
    "prompt_logprobs": 1,
    "thinking_token_budget": 5,
    "watermarking": {"a": 1},
    "allowed_token_ids": [1],
    "bad_words": ["a"],
    "logprob_token_ids": [1],
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {"5": 1},
    "repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 2},
}


@pytest.mark.parametrize("name", REFUSED_EVERYWHERE)
@pytest.mark.parametrize("decode", [chat, completion])
def test_what_is_not_in_this_release_is_refused_by_name(decode, name):
    refused(decode, name, **{name: REFUSED_EVERYWHERE[name]})
    decode(**{name: None})


def test_what_one_kind_does_not_do_is_refused_by_name():
    for name, value in (
        ("echo", True),
        ("include_reasoning", False),
        ("add_special_tokens", True),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("media_io_kwargs", {"a": 1}),
        ("reasoning_effort", "huge"),
        ("reasoning_effort", ["low"]),
    ):
        refused(chat, name, **{name: value})
    for name, value in (("suffix", "end"), ("prompt_embeds", "AAAA")):
        refused(completion, name, **{name: value})
    refused(completion, "echo", echo=True, logprobs=1)
    refused(chat, "extra_args", vllm_xargs={"a": 1})


def test_values_that_ask_for_nothing_are_taken():
    chat(
        response_format={"type": "text"}, best_of=1, priority=0, use_beam_search=False, user="u",
        length_penalty=1, metadata={"a": "b"}, store=True, service_tier="auto", session_id="s",
        frequency_penalty=0, logit_bias={}, bad_words=[], tools=[], tool_choice="auto",
        parallel_tool_calls=True, add_special_tokens=False, functions=[], structured_outputs={},
    )  # fmt: skip


@pytest.mark.bugbank
def test_bugbank_R10_an_empty_list_of_tools_is_taken_and_tools_only_to_be_shown():
    for choice in (None, "none", "auto"):
        assert chat_options(chat(tools=[], tool_choice=choice))["tools"] is None
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert chat_options(chat(tools=[tool], tool_choice="none"))["tools"] == [tool]
    for choice in (None, "auto", "required", {"type": "function", "function": {"name": "f"}}):
        refused(chat, "tool_choice", tools=[tool], tool_choice=choice)
    refused(chat, "tools[0]", tools=[{"type": "web"}], tool_choice="none")
    refused(chat, "tools", tools=[tool] * 129, tool_choice="none")


@pytest.mark.bugbank
def test_bugbank_R11_a_forced_tool_call_without_tools_is_refused():
    refused(chat, "tool_choice", tool_choice="required")
    refused(chat, "tool_choice", tool_choice="required", stream=True)


WRONG: list[tuple[str, Any]] = [
    ("n", 0), ("n", 129), ("n", True), ("n", 1.5), ("n", "1"), ("n", 10**30),
    ("temperature", -1), ("temperature", 2.5), ("temperature", "hot"), ("temperature", True),
    ("top_p", 0), ("top_p", 1.5), ("top_k", -2), ("top_k", 0.5), ("min_p", 2),
    ("seed", 2**70), ("seed", "x"), ("stop", ""), ("stop", [""]), ("stop", 5),
    ("stop_token_ids", [-1]), ("stop_token_ids", [2**40]), ("min_tokens", -1),
    ("max_tokens", 0), ("max_tokens", -5), ("max_tokens", 10**40), ("max_tokens", [1]),
    ("stream", "yes"), ("stream", 1), ("model", 5), ("model", "x" * 600), ("stream_interval", 0),
    ("request_id", ""), ("request_id", "a\nb"), ("request_id", "x" * 200), ("request_id", 7),
    ("priority", 1.5), ("priority", "x"), ("priority", True), ("skip_reading_prefix_cache", 1),
    ("cache_salt", ""), ("cache_salt", 5), ("cache_salt", "x" * 1025), ("timeout", 0),
    ("timeout", -1), ("timeout", True), ("timeout", "1s"), ("timeout", 10**400),
    ("timeout", float("inf")), ("ttft_goal_ms", 0), ("tpot_goal_ms", -5), ("tpot_goal_ms", "x"),
    ("ignore_eos", 1), ("logit_bias", []), ("logit_bias", {"5": "x"}), ("logit_bias", {"5": 1e39}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG, ids=str)
@pytest.mark.parametrize("decode", [chat, completion])
def test_a_wrong_value_is_refused_by_name(decode, name, value):
    message = refused(decode, name, **{name: value})
    assert message.startswith(name) and len(message) < 400


@pytest.mark.bugbank
@pytest.mark.parametrize("key", ["AI", "1.5", "", "-1", "2147483648", "٣", "9" * 40])
def test_bugbank_R01_R02_bad_keys_of_logit_bias_are_refused_for_logit_bias(key):
    refused(chat, "logit_bias", logit_bias={key: -100})
    refused(completion, "logit_bias", logit_bias={key: -100})


def test_fields_that_belong_together_are_checked_together():
    refused(chat, "stream_options", stream_options={"include_usage": True})
    refused(chat, "stream_options.include_usage", stream=True, stream_options={"include_usage": 3})
    refused(chat, "top_logprobs", top_logprobs=2)
    refused(chat, "min_tokens", min_tokens=5, max_tokens=4)
    refused(chat, "max_tokens", max_tokens=5, max_completion_tokens=6)
    refused(chat, "n", n=2, temperature=0)
    refused(chat, "chat_template", chat_template="{{ messages }}")
    refused(completion, "n", prompt=["a"] * 3, n=100)


def test_messages_are_checked_for_their_roles_and_number():
    for messages, name in (
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "root", "content": "hi"}], "messages[0].role"),
        ([*MESSAGES, {"role": ["user"], "content": "hi"}], "messages[1].role"),
        (MESSAGES * 4097, "messages"),
    ):
        assert refused(chat, name, messages=messages)
    with pytest.raises(InvalidRequestError, match="messages must be given"):
        decode_chat_request({})


@pytest.mark.parametrize(
    "prompt",
    [[], None, ["a", 1], [1, "a"], [[1], 2], [[1], "a"], [1.5], [True], [None], {"a": 1}, 5],
    ids=repr,
)
def test_a_prompt_that_is_none_is_refused(prompt):
    refused(completion, "prompt", prompt=prompt)


def test_prompts_are_one_or_several_texts_or_lists_of_ids():
    for prompt, prompts in (
        ("", [""]),
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ):
        assert list_prompts(completion(prompt=prompt)) == prompts
    assert "128" in refused(completion, "prompt", prompt=["a"] * 129)


def test_limits_come_from_the_client_then_the_model_then_the_kind():
    of_model = SamplingParams(max_tokens=99, temperature=0.5, top_k=7)
    assert chat_sampling_params(chat(), DEFAULTS).max_tokens is None
    assert chat_sampling_params(chat(), of_model).max_tokens == 99
    assert chat_sampling_params(chat(max_tokens=3), of_model).max_tokens == 3
    assert chat_sampling_params(chat(max_completion_tokens=4), of_model).max_tokens == 4
    assert completion_sampling_params(completion(), DEFAULTS).max_tokens == 16
    assert completion_sampling_params(completion(), of_model).max_tokens == 99
    params = chat_sampling_params(chat(temperature=1.5), of_model)
    assert (params.temperature, params.top_k) == (1.5, 7)


def test_a_models_default_that_is_not_supported_is_told_as_the_models():
    of_model = SamplingParams(repetition_penalty=1.1)
    with pytest.raises(InvalidRequestError, match="generation_config.json"):
        chat_sampling_params(chat(), of_model)
    assert chat_sampling_params(chat(repetition_penalty=1.0), of_model).repetition_penalty == 1


def test_every_parameter_reaches_the_engine():
    fields: dict[str, Any] = {
        "n": 2, "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.25, "seed": 7,
        "stop": ["x"], "stop_token_ids": [9], "include_stop_str_in_output": True,
        "ignore_eos": True, "min_tokens": 2, "skip_special_tokens": False,
        "spaces_between_special_tokens": False, "stream_interval": 3, "max_tokens": 8,
        "skip_reading_prefix_cache": True,
    }  # fmt: skip
    for params in (
        chat_sampling_params(chat(logprobs=True, top_logprobs=2, **fields), DEFAULTS),
        completion_sampling_params(completion(logprobs=2, **fields), DEFAULTS),
    ):
        assert params.logprobs == 2
        for name, value in fields.items():
            assert getattr(params, name) == value, name
    assert chat_sampling_params(chat(logprobs=True), DEFAULTS).logprobs == 0
    assert chat_sampling_params(chat(logprobs=False), DEFAULTS).logprobs is None
    assert completion_sampling_params(completion(logprobs=0), DEFAULTS).logprobs == 0


@pytest.mark.parametrize("decode", [chat, completion])
def test_salt_deadline_and_goals_are_the_clients_and_the_deadline_else_the_servers(decode):
    request = decode(cache_salt="s" * 1024, timeout=3, ttft_goal_ms=500, tpot_goal_ms=12.5)
    expected = RequestOptions(
        cache_salt="s" * 1024,
        timeout_seconds=3.0,
        ttft_goal_seconds=0.5,
        tpot_goal_seconds=0.0125,
    )
    assert make_request_options(request, 60.0) == make_request_options(request) == expected
    assert make_request_options(decode(), 60.0) == RequestOptions(timeout_seconds=60.0)
    assert make_request_options(decode()) == NO_OPTIONS


def test_options_of_the_template_are_the_clients_over_the_servers():
    request = chat(
        chat_template_kwargs={"a": 1}, documents=[{"text": "d"}], reasoning_effort="low",
        add_generation_prompt=False, continue_final_message=True, chat_template="{{ 1 }}",
    )  # fmt: skip
    options = chat_options(request, {"a": 0, "b": 2}, trusts_template=True)
    assert options == {
        "chat_template": "{{ 1 }}",
        "add_generation_prompt": False,
        "continue_final_message": True,
        "tools": None,
        "chat_template_kwargs": {
            "a": 1, "b": 2, "documents": [{"text": "d"}], "reasoning_effort": "low",
        },
        "parse_special_tokens_in_content": False,
    }  # fmt: skip


def test_unknown_fields_are_listed_or_refused():
    body = {"messages": MESSAGES, "zeta": 1, "alpha": {"deep": [1]}}
    assert decode_chat_request(body)[1] == ["alpha", "zeta"]
    with pytest.raises(InvalidRequestError) as caught:
        decode_chat_request(body, strict=True)
    assert caught.value.parameter == "alpha"


def test_names_of_unknown_fields_cannot_write_headers():
    header = ignored_fields_header(["a\r\nSet-Cookie: x", "é\x00", "x" * 200, "fine_1.2-3"])
    assert header == f"a??Set-Cookie??x,??,{'x' * 64},fine_1.2-3"
    many = ignored_fields_header([str(number) for number in range(1000)])
    assert many.endswith(",...") and many.isascii() and many.count(",") == 16


def test_every_field_of_a_request_has_a_use():
    """A field that is neither applied nor refused would be ignored in silence."""
    inert = {"user", "metadata", "store", "service_tier", "session_id", "parallel_tool_calls"}
    inert |= {"safety_identifier", "prompt_cache_key"}
    root = Path(server.__file__).parent
    files = [root / "state.py", *root.glob("protocol/*.py"), *root.glob("routes/*completions.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    for kind in (CompletionRequest, type(chat())):
        for field in msgspec.structs.fields(kind):
            is_read = f"request.{field.name}" in text or f'"{field.name}"' in text
            assert is_read or field.name in inert, field.name


def test_wrong_types_are_told_in_plain_words():
    for fields, text in (
        ({"max_tokens": "5"}, "max_tokens must be an integer; got '5'"),
        ({"temperature": "x"}, "temperature must be a number; got 'x'"),
        ({"stream": 1}, "stream must be true or false; got 1"),
        ({"stop": 5}, "stop must be a text or a list; got 5"),
        ({"stop": [5]}, "stop[0] must be a text; got an integer"),
        ({"logit_bias": []}, "logit_bias must be an object; got []"),
        ({"n": 0}, "n must be an integer >= 1; got 0"),
        ({"messages": []}, "messages must be a list of length >= 1; got []"),
        ({"max_completion_tokens": 0}, "max_completion_tokens must be an integer >= 1; got 0"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            chat(**fields)
        assert str(caught.value) == text
