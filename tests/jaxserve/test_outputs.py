"""Tests of jaxserve/outputs.py."""

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.outputs import (
    CompletionOutput,
    Logprob,
    RequestOutput,
    RequestStateStats,
    _warn_of_unknown,
)


@pytest.fixture(autouse=True)
def _forget_warnings():
    _warn_of_unknown.cache_clear()


def make_output(*completions: CompletionOutput, finished: bool = False) -> RequestOutput:
    return RequestOutput("r", "hi", [1], None, list(completions), finished)


def test_outputs_are_made_by_position_as_in_vllm():
    output = RequestOutput(
        "r", "hi", [1, 2], None, [CompletionOutput(0, "a", [3], None, None)], True
    )
    assert (output.request_id, output.prompt, output.finished) == ("r", "hi", True)
    assert output.outputs[0].token_ids == [3]
    assert (output.num_cached_tokens, output.kv_transfer_params) == (None, None)


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "error"])
def test_a_completion_is_finished_when_it_has_a_reason(reason):
    assert not CompletionOutput(0, "", []).finished()
    assert CompletionOutput(0, "", [], finish_reason=reason).finished()


def test_unknown_arguments_are_ignored_with_one_warning(caplog):
    later: dict[str, Any] = {"later_field": 1, "another": 2}
    with caplog.at_level(logging.WARNING):
        made = [CompletionOutput(0, "a", [1], **later) for _ in range(3)]
    assert made == [CompletionOutput(0, "a", [1])] * 3
    assert caplog.messages == [
        "CompletionOutput ignores the unknown arguments another, later_field"
    ]
    with caplog.at_level(logging.WARNING):
        RequestOutput("r", None, None, **later)
    assert len(caplog.messages) == 2


def test_missing_arguments_are_still_errors():
    with pytest.raises(TypeError, match="token_ids"):
        CompletionOutput(0, "a")  # type: ignore[call-arg]


@given(st.lists(st.tuples(st.integers(0, 2), st.text(max_size=3)), max_size=12))
def test_added_deltas_give_what_cumulative_outputs_give(pieces):
    deltas, cumulative = make_output(), make_output()
    texts: dict[int, str] = {}
    for position, (index, text) in enumerate(pieces):
        logprobs = [{position: Logprob(-1.0)}]
        deltas.add(
            make_output(CompletionOutput(index, text, [position], -1.0, logprobs)), aggregate=True
        )
        texts[index] = texts.get(index, "") + text
        ids = [p for p, (i, _) in enumerate(pieces[: position + 1]) if i == index]
        whole = CompletionOutput(index, texts[index], ids, -1.0, [{p: Logprob(-1.0)} for p in ids])
        cumulative.add(make_output(whole), aggregate=False)
    assert deltas == cumulative
    assert [output.index for output in deltas.outputs] == sorted(texts)


def test_adding_takes_the_end_and_leaves_the_added_output_alone():
    total = make_output()
    first = make_output(CompletionOutput(0, "a", [1]))
    stats = RequestStateStats(num_generation_tokens=2)
    last = make_output(
        CompletionOutput(0, "b", [2], finish_reason="stop", stop_reason="x"), finished=True
    )
    last.metrics = stats
    total.add(first, aggregate=True)
    total.add(last, aggregate=True)
    completion = total.outputs[0]
    assert (completion.text, completion.token_ids) == ("ab", [1, 2])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "x")
    assert total.finished and total.metrics is stats
    assert first.outputs[0] == CompletionOutput(0, "a", [1])


def test_repr_is_short_and_shows_what_is_set():
    completion = CompletionOutput(0, "hello", list(range(100)), finish_reason="length")
    assert repr(completion) == (
        "CompletionOutput(index=0, text='hello', token_ids=[0, 1, 2, 3, 4, 5, 6, 7, ... 100 in "
        "all], finish_reason='length')"
    )
    assert "outputs=[CompletionOutput(index=0" in repr(make_output(completion))


def test_the_html_view_escapes_all_that_clients_and_models_wrote():
    evil = '<script>alert(1)</script> & "quotes"'
    output = RequestOutput(
        "r", evil, [1], outputs=[CompletionOutput(0, evil, [1], finish_reason="error", error=evil)]
    )
    shown = output._repr_html_()
    assert "<script" not in shown
    assert shown.count("&lt;script&gt;") == 3
    assert "output 0 (error)" in shown
    assert "[1]" in RequestOutput("r", None, [1])._repr_html_()
