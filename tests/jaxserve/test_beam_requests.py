"""A prompt's search as requests: what they ask, how they are run, and how a search ends early."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any, cast

import pytest

from jaxserve.errors import EngineDeadError, InvalidRequestError
from jaxserve.outputs import CompletionOutput, RequestOutput, RequestStateStats
from jaxserve.processing.beam_requests import PromptSearch
from jaxserve.processing.beam_runs import run_search, run_searches
from jaxserve.processing.request_loop import RequestLoop, Submission
from jaxserve.request import Request
from jaxserve.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from tests.jaxserve.small_tokenizers import byte_level
from tests.jaxserve.table_model import TableModel, plain_beam_search

MODEL = TableModel(12, seed=7)
PROMPT = (3, 1, 4)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def search_of(
    prompt: tuple[int, ...] = PROMPT,
    *,
    clock: Clock | None = None,
    asked: SamplingParams | None = None,
    ignore_eos: bool = True,
    end: int = 0,
    **fields: Any,
) -> PromptSearch:
    request = Request(
        request_id=f"p{prompt[-1]}",
        prompt_token_ids=prompt,
        sampling_params=asked or SamplingParams(n=3, max_tokens=5),
        eos_token_ids=(end,),
        arrival_seconds=100.0,
        **fields,
    )
    params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=ignore_eos)
    return PromptSearch((request, "abc"), params, max_logprobs=20, clock=clock or Clock())


def answer(request: Request, **part: Any) -> RequestOutput:
    """What an engine says to a request of one token."""
    top = MODEL.top(request.prompt_token_ids[-1], request.sampling_params.logprobs or 0)
    token_id = min(top, key=lambda i: top[i].rank or 0)
    completion = CompletionOutput(
        **{
            "index": 0,
            "text": "",
            "token_ids": [token_id],
            "logprobs": [top],
            "finish_reason": "length",
            **part,
        }
    )
    stats = RequestStateStats(
        num_generation_tokens=len(completion.token_ids),
        arrival_time=request.arrival_seconds,
        scheduled_ts=request.arrival_seconds + 0.5 if completion.token_ids else None,
        last_token_ts=request.arrival_seconds + 1,
    )
    ids = list(request.prompt_token_ids)
    num_cached = len(ids) // 2
    return RequestOutput(
        request.request_id, None, ids, None, [completion], True, stats, num_cached_tokens=num_cached
    )


def cut(reason: str, **part: Any) -> dict[str, Any]:
    return {"token_ids": [], "logprobs": [], "finish_reason": reason, **part}


def step(search: PromptSearch, **part: Any) -> list[Request]:
    """Run one step; the part is that of the last request's answer."""
    requests = [request for request, _ in search.next_step()]
    outputs = [answer(request) for request in requests]
    if outputs:
        outputs[-1] = answer(requests[-1], **part)
    search.take(outputs)
    return requests


def expected(prompt: tuple[int, ...] = PROMPT) -> list[tuple[tuple[int, ...], float]]:
    return plain_beam_search(
        MODEL, prompt, beam_width=3, max_tokens=5, num_candidates=6, ends=frozenset({0}),
        ignore_eos=True,
    )  # fmt: skip


def found(search: PromptSearch) -> list[tuple[tuple[int, ...], float]]:
    output = search.request_output(None, 3)
    return [(tuple(part.token_ids), part.cumulative_logprob or 0.0) for part in output.outputs]


class FakeLoop:
    """Answers requests at once, and keeps how many came together."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []

    def run(self, submissions: Sequence[Submission], show: Any) -> list[RequestOutput]:
        self.steps.append([request.request_id for request, _ in submissions])
        return [answer(request) for request, _ in submissions]


def run(searches: list[PromptSearch], limit: int | None = None) -> tuple[FakeLoop, list[int]]:
    loop, shown = FakeLoop(), list[int]()
    run_searches(searches, cast(RequestLoop, loop), limit, shown.append)
    return loop, shown


def test_a_step_is_a_request_of_one_greedy_token_for_each_live_beam():
    asked = SamplingParams(n=3, max_tokens=5, logprobs=9, skip_reading_prefix_cache=True)
    search = search_of(asked=asked, cache_salt="salt", priority=4)
    (first,) = step(search)
    second = step(search)
    assert first.prompt_token_ids == PROMPT and len(second) == 3
    assert all(request.prompt_token_ids[:-1] == PROMPT for request in second)
    assert len({request.request_id for request in [first, *second]}) == 4
    for request in (first, *second):
        params = request.sampling_params
        assert (params.max_tokens, params.temperature, params.n) == (1, 0.0, 1)
        assert params.logprobs == 9 and params.ignore_eos and not params.detokenize
        assert params.output_kind is RequestOutputKind.FINAL_ONLY
        assert params.skip_reading_prefix_cache is True
        assert (request.cache_salt, request.priority) == ("salt", 4)
    assert step(search_of())[0].sampling_params.logprobs == 6


def test_searches_run_together_or_so_many_at_a_time_and_find_the_same():
    prompts = [(3, 1, last) for last in (4, 5, 6, 7)]
    together = [search_of(prompt) for prompt in prompts]
    loop, shown = run(together)
    assert [len(ids) for ids in loop.steps] == [4, 12, 12, 12, 12] and shown == [0, 0, 0, 0, 4]
    assert [found(search) for search in together] == [expected(prompt) for prompt in prompts]
    limited = [search_of(prompt) for prompt in prompts]
    loop, shown = run(limited, 3)
    assert len(loop.steps) == 10 and max(map(len, loop.steps)) == 9 and sum(shown) == 4
    assert [found(search) for search in limited] == [found(search) for search in together]


@pytest.mark.parametrize("limit", [0, -1, 1.5, True])
def test_a_limit_that_is_no_count_is_refused(limit):
    with pytest.raises(InvalidRequestError, match="concurrency_limit"):
        run([search_of()], limit)


def test_both_outputs_tell_of_the_same_beams():
    search = search_of((66, 1, 4), asked=SamplingParams(n=3, max_tokens=5, logprobs=2))
    run([search])
    tokenizer = byte_level()
    output, beams = search.request_output(tokenizer, 2), search.beam_output(tokenizer).sequences
    assert len(output.outputs) == 2 and len(beams) == 3
    assert output.finished and output.prompt == "abc" and output.prompt_token_ids == [66, 1, 4]
    for part, beam in zip(output.outputs, beams, strict=False):
        assert (
            beam.tokens == [66, 1, 4, *part.token_ids]
            and beam.cum_logprob == part.cumulative_logprob
        )
        assert (
            beam.logprobs == part.logprobs and part.finish_reason == beam.finish_reason == "length"
        )
        assert beam.text == tokenizer.decode(beam.tokens, skip_special_tokens=False)
        assert part.text and beam.text is not None and beam.text.endswith(part.text)
        logprobs = part.logprobs or []
        chosen = [next(iter(entries.items())) for entries in logprobs]
        assert [token_id for token_id, _ in chosen] == part.token_ids
        assert sum(entry.logprob for _, entry in chosen) == pytest.approx(part.cumulative_logprob)
        assert all(entry.decoded_token == tokenizer.token_text(i) for i, entry in chosen)
    assert beams[0].orig_prompt == {"prompt_token_ids": [66, 1, 4], "prompt": "abc"}


def test_without_a_tokenizer_or_logprobs_there_are_none_in_the_answer():
    search = search_of()
    run([search])
    output = search.request_output(None, 3)
    assert all(part.text == "" and part.logprobs is None for part in output.outputs)
    assert all(beam.text is None for beam in search.beam_output(None).sequences)


def test_an_answer_leaves_the_end_token_out_of_the_text_unless_it_was_asked_for():
    texts, end = {}, expected()[0][0][1]
    for include in (False, True):
        asked = SamplingParams(
            n=3, max_tokens=5, include_stop_str_in_output=include, skip_special_tokens=False
        )
        search = search_of(asked=asked, ignore_eos=False, end=end)
        run([search])
        parts = search.request_output(byte_level(), 3).outputs
        texts[include] = [part.text for part in parts if part.finish_reason == "stop"]
        assert all(part.stop_reason == end for part in parts if part.finish_reason == "stop")
    shown = byte_level().token_text(end)
    assert shown and texts[False] and [text + shown for text in texts[False]] == texts[True]


def test_the_stats_are_those_of_all_steps():
    clock = Clock()
    search = search_of(clock=clock)
    while not search.is_done:
        step(search)
        clock.now += 10
    output = search.request_output(None, 3)
    assert output.metrics is not None and output.num_cached_tokens == 1
    assert (output.metrics.arrival_time, output.metrics.scheduled_ts) == (100.0, 100.5)
    assert output.metrics.last_token_ts == 141.0
    assert output.metrics.num_generation_tokens == 1 + 4 * 3


def test_a_deadline_holds_for_the_search_and_each_later_step_arrives_when_it_is_sent():
    clock = Clock()
    search = search_of(clock=clock, timeout_seconds=30.0)
    clock.now += 2
    (first,) = step(search)
    assert (first.arrival_seconds, first.timeout_seconds) == (100.0, 30.0)
    clock.now += 20
    second = step(search)
    assert {(r.arrival_seconds, r.timeout_seconds) for r in second} == {(122.0, 8.0)}
    clock.now += 8
    assert search.next_step() == [] and search.is_done
    search.take([])
    beams = search.request_output(None, 3).outputs
    assert [len(beam.token_ids) for beam in beams] == [2, 2, 2]
    assert {beam.finish_reason for beam in beams} == {"timeout"}


@pytest.mark.parametrize("reason", ["timeout", "abort"])
def test_a_step_that_is_cut_short_ends_the_search_with_what_there_is(reason):
    search = search_of()
    step(search)
    step(search, **cut(reason))
    assert search.is_done
    beams = search.request_output(None, 3).outputs
    assert [(len(beam.token_ids), beam.finish_reason) for beam in beams] == [(1, reason)] * 3


def test_a_search_that_only_waited_tells_that_nothing_ran():
    search = search_of()
    step(search, **cut("timeout"))
    output = search.request_output(None, 3)
    assert output.metrics is not None and output.metrics.scheduled_ts is None
    assert [(part.token_ids, part.finish_reason) for part in output.outputs] == [([], "timeout")]


def test_a_step_that_fails_is_told_by_both_outputs():
    search = search_of()
    step(search)
    step(search, **cut("error", error="logits held NaN"))
    assert search.is_done
    (part,) = search.request_output(None, 3).outputs
    (beam,) = search.beam_output(None).sequences
    assert (part.finish_reason, part.error) == ("error", "logits held NaN")
    assert (beam.finish_reason, beam.error) == ("error", "logits held NaN")


class FakeEngine:
    """Streams of requests that end when they are told to."""

    def __init__(self, *, fails_at: int | None = None, hangs: bool = False):
        self.num_open = self.most_open = self.num_started = 0
        self._fails_at, self._hangs = fails_at, hangs

    async def stream(self, submission: Submission) -> AsyncGenerator[RequestOutput]:
        self.num_open += 1
        self.num_started += 1
        number = self.num_started
        self.most_open = max(self.most_open, self.num_open)
        try:
            await asyncio.sleep(0)
            if number == self._fails_at:
                raise EngineDeadError("gone")
            if self._hangs or self._fails_at is not None and number > 1:
                await asyncio.sleep(60)
            yield answer(submission[0])
        finally:
            self.num_open -= 1


@pytest.mark.asyncio
async def test_on_an_event_loop_the_beams_of_a_step_run_together():
    engine, search = FakeEngine(), search_of()
    await run_search(search, engine.stream)
    assert found(search) == expected()
    assert (engine.most_open, engine.num_open, engine.num_started) == (3, 0, 13)


@pytest.mark.asyncio
async def test_when_one_beam_raises_the_others_are_left():
    engine = FakeEngine(fails_at=3)
    with pytest.raises(EngineDeadError):
        await run_search(search_of(), engine.stream)
    assert (engine.num_started, engine.num_open) == (4, 0)


@pytest.mark.asyncio
async def test_who_leaves_early_leaves_no_request_behind():
    engine = FakeEngine(hangs=True)
    task = asyncio.create_task(run_search(search_of(), engine.stream))
    await asyncio.sleep(0.01)
    assert engine.num_open == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.num_open == 0
