"""Beam searches over HTTP, at both routes, in front of an engine that is a table."""

import asyncio
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from jaxserve.request import FinishReason, Request
from jaxserve.step import SequenceUpdate, TokenLogprobs
from tests.jaxserve.small_tokenizers import byte_level
from tests.jaxserve.table_model import TableModel, plain_beam_search
from tests.server.answers import error_of, strict
from tests.server.scripted_engine import VOCAB_SIZE, Served

pytestmark = pytest.mark.asyncio

MODEL = TableModel(VOCAB_SIZE, seed=4, sharpness=3.0)
PROMPT = [70, 80, 90]
BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 3, "max_tokens": 5}


def table(request: Request, index: int) -> list[SequenceUpdate]:
    """One token of the table, as an engine that obeys `max_tokens=1` gives it."""
    num_top = request.sampling_params.logprobs or 0
    top = sorted(
        MODEL.top(request.prompt_token_ids[-1], num_top).items(), key=lambda item: item[1].rank or 0
    )
    ids, logprobs = [i for i, _ in top], [entry.logprob for _, entry in top]
    entry = TokenLogprobs(logprobs[0], 1, tuple(ids), tuple(logprobs))
    return [
        SequenceUpdate(
            request_id=request.request_id,
            index=index,
            new_token_ids=(ids[0],),
            logprobs=(entry,),
            finish_reason=FinishReason.LENGTH,
        )
    ]


def fails(request: Request, index: int) -> list[SequenceUpdate]:
    error = {"finish_reason": FinishReason.ERROR, "error": "logits held NaN", "logprobs": ()}
    return [SequenceUpdate(request_id=request.request_id, index=index, new_token_ids=(), **error)]


def expected(**changes: Any) -> list[tuple[tuple[int, ...], float]]:
    settings: dict[str, Any] = {
        "beam_width": 3,
        "max_tokens": 5,
        "num_candidates": 6,
        "ends": frozenset(byte_level().eos_token_ids),
    }
    return plain_beam_search(MODEL, tuple(PROMPT), **(settings | changes))


async def test_a_completion_has_the_best_beams_as_its_choices():
    async with Served(table, strict=True) as served:
        response = await served.complete(PROMPT, return_token_ids=True, logprobs=2, **BEAMS)
        answer = strict(response.content)
        Completion.model_validate(answer)
        assert [tuple(c["token_ids"]) for c in answer["choices"]] == [t for t, _ in expected()]
        for choice, (tokens, total) in zip(answer["choices"], expected(), strict=True):
            assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(total)
            assert len(choice["logprobs"]["top_logprobs"][0]) in (2, 3)
            has_ended = tokens[-1] in byte_level().eos_token_ids
            shown = tokens[:-1] if has_ended else tokens
            assert choice["text"] == byte_level().decode(shown)
            assert choice["finish_reason"] == ("stop" if has_ended else "length")
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        num_output = sum(len(tokens) for tokens, _ in expected())
        assert answer["usage"]["completion_tokens"] == num_output
        assert answer["usage"]["prompt_tokens"] == len(PROMPT)
        steps = [message.request() for message in served.process.added]
        assert len(steps) == 1 + 4 * 3
        assert {(s.sampling_params.n, s.sampling_params.max_tokens) for s in steps} == {(1, 1)}


async def test_a_chat_has_the_best_beams_as_its_choices_and_no_logprobs_unasked():
    async with Served(table) as served:
        response = await served.chat(return_token_ids=True, temperature=0, **BEAMS)
        answer = strict(response.content)
        ChatCompletion.model_validate(answer)
        prompt = served.process.added[0].request().prompt_token_ids
        beams = plain_beam_search(
            MODEL, prompt, beam_width=3, max_tokens=5, num_candidates=6,
            ends=frozenset(byte_level().eos_token_ids),
        )  # fmt: skip
        assert [tuple(c["token_ids"]) for c in answer["choices"]] == [t for t, _ in beams]
        assert all(choice["logprobs"] is None for choice in answer["choices"])


async def test_the_fields_of_the_search_reach_it():
    end = expected(ends=frozenset())[0][0][1]

    async def found(**fields: Any) -> list[tuple[int, ...]]:
        made = await served.complete(PROMPT, return_token_ids=True, **(BEAMS | fields))
        return [tuple(choice["token_ids"]) for choice in made.json()["choices"]]

    async with Served(table) as served:
        served.engine._request_maker._eos_token_ids = (end,)
        ends = frozenset({end})
        for fields in ({"penalty": -3.0}, {"penalty": 9.0}, {"ignore_eos": True}):
            of_body = {{"penalty": "length_penalty"}.get(k, k): v for k, v in fields.items()}
            best = [tokens for tokens, _ in expected(ends=ends, **fields)]
            assert await found(**of_body) == best
        wide = [tokens for tokens, _ in expected(ends=ends, beam_width=6, num_candidates=12)]
        assert await found(best_of=6, n=2) == wide[:2]


async def test_several_prompts_are_searched_each_for_itself():
    async with Served(table) as served:
        answer = (await served.complete([PROMPT, [5, 6]], return_token_ids=True, **BEAMS)).json()
        alone = (await served.complete([[5, 6]], return_token_ids=True, **BEAMS)).json()
        choices = answer["choices"]
        assert [choice["index"] for choice in choices] == list(range(6))
        assert [tuple(c["token_ids"]) for c in choices[:3]] == [t for t, _ in expected()]
        assert [c["token_ids"] for c in choices[3:]] == [c["token_ids"] for c in alone["choices"]]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("stream", {"stream": True}),
        ("n", {"n": 11}),
        ("best_of", {"best_of": 11}),
        ("best_of", {"best_of": 2}),
        ("best_of", {"best_of": "4"}),
        ("stop", {"stop": "x"}),
        ("stop_token_ids", {"stop_token_ids": [5]}),
        ("min_tokens", {"min_tokens": 2}),
        ("temperature", {"temperature": 2.5}),
        ("logit_bias", {"logit_bias": {"5": 1}}),
        ("length_penalty", {"length_penalty": 0.5, "use_beam_search": False}),
        ("max_tokens", {"max_tokens": 5000}),
    ],
)
async def test_what_does_not_go_together_is_refused_by_name_and_nothing_runs(param, fields):
    async with Served(table) as served:
        for ask in (served.chat, served.complete):
            message = error_of(await ask(**(BEAMS | fields)), 400, param)
            assert param in message or param == "max_tokens"
            assert fields != {"best_of": 2} or message == "best_of must be at least n = 3; got 2"
        assert not served.process.added


async def test_the_operators_limit_of_logprobs_limits_the_beams():
    async with Served(table, engine_config={"max_logprobs": 5}) as served:
        assert (await served.complete(PROMPT, **(BEAMS | {"n": 2}))).status_code == 200
        message = error_of(await served.complete(PROMPT, **BEAMS), 400, "n")
        assert "at most 2" in message and "max_logprobs is 5" in message


async def test_a_step_that_fails_fails_the_request():
    async with Served(fails) as served:
        assert "NaN" in error_of(await served.complete(PROMPT, **BEAMS), 500)


async def test_a_search_that_only_waited_is_answered_503():
    def waits(request: Request, index: int) -> list[SequenceUpdate]:
        reason = FinishReason.TIMEOUT
        return [SequenceUpdate(request_id=request.request_id, index=index, new_token_ids=(),
                               finish_reason=reason, logprobs=())]  # fmt: skip

    async with Served(waits) as served:
        error_of(await served.complete(PROMPT, timeout=5, **BEAMS), 503)


async def test_a_client_that_leaves_ends_the_requests_of_its_step():
    held = False

    def once(request: Request, index: int) -> list[SequenceUpdate]:
        nonlocal held
        if len(request.prompt_token_ids) > len(PROMPT):
            served.process.hold()
            held = True
        return table(request, index)

    async with Served(once) as served:
        asking = asyncio.create_task(served.complete(PROMPT, **BEAMS))
        while not (held and len(served.process.added) == 4):
            await asyncio.sleep(0.001)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        while len(served.process.aborted) < 3:
            await asyncio.sleep(0.001)
        sent = {message.request_id for message in served.process.added[1:]}
        assert set(served.process.aborted) == sent
        assert served.engine.num_unfinished_requests == 0
