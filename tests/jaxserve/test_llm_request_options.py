"""What LLM hands to the engine besides prompts and parameters, and what its prefix cache finds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.llm import LLM
from jaxserve.outputs import RequestOutput
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from tests.tiny_llm import MODEL, SETTINGS, write_tokenizer

PROMPT = [(7 * i) % 200 + 10 for i in range(40)]
NUM_CACHED = 39
"""All tokens of PROMPT but the last."""
MESSAGES = [{"role": "user", "content": " ".join(f"w{i}" for i in PROMPT)}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    tokenizer: Path = write_tokenizer(tmp_path_factory.mktemp("words"))
    return LLM(MODEL, tokenizer=tokenizer, scheduling_policy="priority", **SETTINGS)


@pytest.fixture
def sent(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests that reach the engine."""
    seen: list[Request] = []
    add = llm.engine.add

    def watched(request: Request) -> None:
        seen.append(request)
        add(request)

    monkeypatch.setattr(llm.engine, "add", watched)
    return seen


def ask(llm: LLM, salt: str | None = None, **fields: Any) -> tuple[list[int], int | None]:
    """Tokens and cached tokens of PROMPT."""
    params = SamplingParams(temperature=0, max_tokens=6, **fields)
    prompt = {"prompt_token_ids": PROMPT, "cache_salt": salt}
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output.outputs[0].token_ids, output.num_cached_tokens


def start_of(output: RequestOutput) -> float | None:
    """When a request was first scheduled."""
    assert output.metrics is not None
    return output.metrics.scheduled_ts


def test_an_equal_prompt_is_found_but_for_its_last_token_and_gives_the_same_tokens(llm: LLM):
    llm.reset_prefix_cache()
    tokens, num_cached = ask(llm)
    assert num_cached == 0
    assert ask(llm) == (tokens, NUM_CACHED)


def test_a_salt_shares_with_its_equals_only(llm: LLM):
    ask(llm)
    for salt in ("first", "second"):
        tokens, num_cached = ask(llm, salt)
        assert num_cached == 0
        assert ask(llm, salt) == (tokens, NUM_CACHED)
    assert ask(llm) == (tokens, NUM_CACHED)


def test_a_request_that_skips_the_cache_computes_its_prompt_and_shares_it(llm: LLM):
    llm.reset_prefix_cache()
    tokens, _ = ask(llm, skip_reading_prefix_cache=True)
    assert ask(llm, skip_reading_prefix_cache=True) == (tokens, 0)
    assert ask(llm, skip_reading_prefix_cache=False) == (tokens, NUM_CACHED)


def test_a_reset_forgets_and_harms_no_stream_that_runs(llm: LLM):
    expected, _ = ask(llm)
    params = SamplingParams(temperature=0, max_tokens=6)
    streamed: list[int] = []
    for number, output in enumerate(llm.stream({"prompt_token_ids": PROMPT}, params)):
        streamed += output.outputs[0].token_ids
        if number == 1:
            assert llm.reset_prefix_cache() is True
            assert ask(llm) == (expected, 0)
    assert streamed == expected
    assert ask(llm) == (expected, NUM_CACHED)


def test_several_sequences_count_what_was_cached_before_they_came(llm: LLM):
    llm.reset_prefix_cache()
    params = SamplingParams(n=3, max_tokens=4, seed=1, ignore_eos=True)
    for num_cached in (0, NUM_CACHED):
        (output,) = llm.generate(PROMPT, params, use_tqdm=False)
        assert output.num_cached_tokens == num_cached


@pytest.mark.parametrize("name", ["reset_running_requests", "reset_connector"])
def test_a_reset_of_more_is_refused_by_name(llm: LLM, name: str):
    with pytest.raises(InvalidRequestError, match=f"{name} is not supported in this release"):
        llm.reset_prefix_cache(**{name: True})


CALLS: dict[str, Callable[..., Any]] = {
    "generate": lambda llm, **options: llm.generate([[5, 6], [7]], use_tqdm=False, **options),
    "chat": lambda llm, **options: llm.chat([MESSAGES] * 2, use_tqdm=False, **options),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_priority_and_timeout_are_for_all_or_for_each(llm: LLM, sent: list[Request], call):
    call(llm)
    call(llm, priority=7, timeout=300)
    call(llm, priority=[2, -1])
    assert [request.priority for request in sent] == [0, 0, 7, 7, 2, -1]
    seconds = [request.timeout_seconds for request in sent]
    assert seconds == [None, None, 300.0, 300.0, None, None]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority": [1]}, "priority must be one integer, or one for each of 2 prompts; got 1"),
        ({"priority": "high"}, "priority must be an integer; got 'high'"),
        ({"timeout": 0}, "timeout must be greater than 0; got 0"),
    ],
)
def test_a_bad_priority_or_timeout_is_refused_before_anything_runs(
    llm: LLM, sent: list[Request], call, options, message
):
    with pytest.raises(InvalidRequestError) as caught:
        call(llm, **options)
    assert str(caught.value) == message and not sent


def test_what_a_prompt_says_itself_goes_over_what_is_said_for_all(llm: LLM, sent: list[Request]):
    own = {"prompt_token_ids": [5], "timeout": 200, "cache_salt": "a"}
    llm.generate([own, [6]], use_tqdm=False, timeout=100)
    asked = [(request.timeout_seconds, request.cache_salt) for request in sent]
    assert asked == [(200.0, "a"), (100.0, None)]


def test_the_smallest_priority_runs_first(llm: LLM):
    priorities = [9] * 8 + [-1]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    outputs = llm.generate([[7, n] for n in range(9)], params, priority=priorities, use_tqdm=False)
    starts = list(map(start_of, outputs))
    assert None not in starts and starts[-1] == min(start or 0.0 for start in starts) != starts[-2]


@pytest.mark.parametrize("name", ["ttft_goal_ms", "tpot_goal_ms"])
def test_goals_are_refused_under_a_policy_that_does_not_go_by_them(
    llm: LLM, sent: list[Request], name: str
):
    with pytest.raises(InvalidRequestError, match=f"{name} must not be given under .* priority"):
        llm.generate([[5], {"prompt_token_ids": [5], name: 100}], use_tqdm=False)
    assert not sent


def test_who_waits_longer_than_max_queue_time_ends_without_a_token():
    llm = LLM(MODEL, skip_tokenizer_init=True, max_queue_time=0.001, **SETTINGS)
    params = SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False)
    outputs = llm.generate([[7, n] for n in range(9)], params, use_tqdm=False)
    late = outputs[SETTINGS["max_num_seqs"] :]
    assert [output.outputs[0].finish_reason for output in late] == ["timeout"] * len(late)
    assert {start_of(output) for output in late} == {None}
    assert not any(output.outputs[0].token_ids for output in late)
