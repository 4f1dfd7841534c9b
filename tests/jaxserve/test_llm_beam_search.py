"""LLM.beam_search on a tiny real model, against a search over its own log-probabilities."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.beam_search import BeamSearchSequence
from jaxserve.errors import InvalidRequestError, RequestTooLongError
from jaxserve.llm import LLM
from jaxserve.sampling_params import BeamSearchParams, SamplingParams
from tests.tiny_llm import MODEL, SETTINGS, to_text, write_tokenizer

PROMPT = [(7 * i) % 200 + 10 for i in range(40)]
NUM_CACHED = 32
"""Tokens of PROMPT in full pages of 16."""
OTHERS = [[(11 * i + 5) % 200 + 10 for i in range(count)] for count in (3, 17)]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    tokenizer: Path = write_tokenizer(tmp_path_factory.mktemp("words"))
    return LLM(MODEL, tokenizer=str(tokenizer), **SETTINGS)


def search(llm: LLM, prompts: Any = None, **fields: Any) -> list[list[BeamSearchSequence]]:
    given: dict[str, Any] = {"beam_width": 4, "max_tokens": 6}
    params = BeamSearchParams(**(given | fields))
    prompts = [PROMPT] if prompts is None else prompts
    return [output.sequences for output in llm.beam_search(prompts, params)]


def tokens_of(beams: list[BeamSearchSequence]) -> list[list[int]]:
    return [beam.tokens for beam in beams]


def top_of(llm: LLM, prompts: list[list[int]]) -> list[dict[int, float]]:
    """The 20 most likely next tokens of prompts, each computed without the prefix cache."""
    params = SamplingParams(
        temperature=0, max_tokens=1, logprobs=20, ignore_eos=True, skip_reading_prefix_cache=True
    )
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        {i: entry.logprob for i, entry in (output.outputs[0].logprobs or [{}])[0].items()}
        for output in outputs
    ]


def eos_of(llm: LLM) -> set[int]:
    (submission,) = llm.request_maker.of_prompts([5], None, SamplingParams().output_kind)
    return set(submission[0].eos_token_ids)


def plain_search(llm: LLM, width: int, num_tokens: int) -> list[tuple[list[int], float]]:
    """All beams of one length, over whole prompts and with nothing kept."""
    live: list[tuple[list[int], float]] = [(PROMPT, 0.0)]
    for _ in range(num_tokens):
        grown = [
            ([*tokens, token_id], total + logprob)
            for (tokens, total), top in zip(live, top_of(llm, [t for t, _ in live]), strict=True)
            for token_id, logprob in top.items()
        ]
        order = np.argsort([-total for _, total in grown], kind="stable")[:width]
        live = [grown[index] for index in order]
    return live


def test_the_beams_are_those_of_a_search_over_whole_prompts(llm: LLM):
    expected = plain_search(llm, 4, 6)
    (beams,) = search(llm, ignore_eos=True)
    assert tokens_of(beams) == [tokens for tokens, _ in expected]
    totals = [total for _, total in expected]
    assert [beam.cum_logprob for beam in beams] == pytest.approx(totals, abs=TOLERANCE)
    for beam in beams:
        output = beam.tokens[len(PROMPT) :]
        chosen = [entries[i].logprob for i, entries in zip(output, beam.logprobs, strict=True)]
        assert sum(chosen) == pytest.approx(beam.cum_logprob) and len(beam.logprobs[0]) == 8
        assert (beam.finish_reason, beam.stop_reason) == ("length", None)
        assert beam.text == to_text(beam.tokens)
        assert beam.logprobs[0][output[0]].decoded_token == f" {to_text(output[:1])}"


def test_two_tokens_are_ranked_as_all_pairs_behind_the_likeliest_first_ones(llm: LLM):
    (first,) = top_of(llm, [PROMPT])
    ids = sorted(first, key=lambda i: -first[i])[:10]
    seconds = top_of(llm, [[*PROMPT, token_id] for token_id in ids])
    pairs = {
        (one, two): first[one] + logprob
        for one, top in zip(ids, seconds, strict=True)
        for two, logprob in top.items()
    }
    (beams,) = search(llm, beam_width=10, max_tokens=2, ignore_eos=True)
    best = sorted(pairs, key=lambda pair: -pairs[pair])[:10]
    assert tokens_of(beams) == [[*PROMPT, *pair] for pair in best]


def test_a_beam_of_one_is_greedy(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (greedy,) = llm.generate([PROMPT], params, use_tqdm=False)
    ((beam,),) = search(llm, beam_width=1, ignore_eos=True)
    assert beam.tokens == [*PROMPT, *greedy.outputs[0].token_ids]


def test_the_prefix_cache_is_hit_by_all_steps_but_the_first(llm: LLM):
    llm.reset_prefix_cache()
    before = llm.engine.scheduler.num_prefix_hits
    search(llm, ignore_eos=True)
    assert llm.engine.scheduler.num_prefix_hits - before >= 5 * 4 * NUM_CACHED


@pytest.mark.parametrize("beam_width", [4, 10])
def test_a_beam_computes_its_newest_token_alone(llm: LLM, beam_width: int):
    llm.reset_prefix_cache()
    before, num_copied = llm.engine.times.num_tokens, llm.engine.scheduler.num_copied_pages
    search(llm, beam_width=beam_width, ignore_eos=True)  # 6 tokens; a page of the prompt holds 8
    assert llm.engine.times.num_tokens - before == len(PROMPT) + 5 * beam_width
    assert llm.engine.scheduler.num_copied_pages - num_copied == 5 * beam_width


def test_pages_that_beams_fill_are_found_by_their_next_step(llm: LLM):
    llm.reset_prefix_cache()
    before = llm.engine.scheduler.num_prefix_hits
    search(llm, beam_width=2, max_tokens=12, ignore_eos=True)
    hits = llm.engine.scheduler.num_prefix_hits - before
    assert hits >= 2 * (8 * NUM_CACHED + 3 * (NUM_CACHED + 16))


def test_prompts_together_alone_and_few_at_a_time_give_the_same(llm: LLM):
    prompts = [PROMPT, *OTHERS]
    together = search(llm, prompts)
    params = BeamSearchParams(beam_width=4, max_tokens=6)
    for limit in (1, 2):
        limited = llm.beam_search(prompts, params, concurrency_limit=limit)
        for output, beams in zip(limited, together, strict=True):
            assert tokens_of(output.sequences) == tokens_of(beams)
    assert [tokens_of(search(llm, [prompt])[0]) for prompt in prompts] == [
        tokens_of(beams) for beams in together
    ]


def test_it_is_the_same_each_time_and_at_each_temperature(llm: LLM):
    first = search(llm)
    for temperature in (0.0, 1.0):
        again = search(llm, temperature=temperature)
        assert again == first


def test_an_end_token_ends_a_beam_unless_it_is_ignored(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    (free,) = search(llm, ignore_eos=True)
    end = free[0].tokens[len(PROMPT) + 1]
    monkeypatch.setattr(llm.request_maker, "_eos_token_ids", (end,))
    (beams,) = search(llm)
    stopped = [beam for beam in beams if beam.finish_reason == "stop"]
    assert stopped and all(beam.tokens[-1] == end == beam.stop_reason for beam in stopped)
    assert all(end not in beam.tokens[len(PROMPT) : -1] for beam in beams)
    (ignored,) = search(llm, ignore_eos=True)
    assert {tuple(beam.tokens) for beam in ignored} == {tuple(beam.tokens) for beam in free}


def test_the_length_penalty_orders_the_beams(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    (free,) = search(llm, ignore_eos=True)
    end = free[0].tokens[len(PROMPT) + 1]
    monkeypatch.setattr(llm.request_maker, "_eos_token_ids", (end,))
    mean_length = {}
    for penalty in (-4.0, 20.0):
        (beams,) = search(llm, length_penalty=penalty)
        lengths = [len(beam.tokens) - (beam.tokens[-1] == end) for beam in beams]
        scores = [b.cum_logprob / n**penalty for b, n in zip(beams, lengths, strict=True)]
        assert scores == sorted(scores, reverse=True) and len(beams) == 4
        mean_length[penalty] = sum(lengths) / 4
    assert mean_length[-4.0] < mean_length[20.0]


def test_text_and_dicts_are_prompts_and_one_needs_no_list(llm: LLM):
    (beams,) = search(llm, "w20 w21")
    assert beams[0].orig_prompt == {"prompt_token_ids": [20, 21], "prompt": "w20 w21"}
    assert tokens_of(search(llm, {"prompt_token_ids": [20, 21]})[0]) == tokens_of(beams)
    assert search(llm, []) == []


def test_finished_prompts_are_shown(llm: LLM):
    seen: dict[str, Any] = {"new": 0}

    class Bar:
        def __init__(self, total: int, **_: Any) -> None:
            seen["total"] = total

        def update(self, count: int) -> None:
            seen["new"] += count

        def close(self) -> None:
            seen["is_closed"] = True

    llm.beam_search(OTHERS, BeamSearchParams(beam_width=2, max_tokens=2), use_tqdm=Bar)
    assert seen == {"total": 2, "new": 2, "is_closed": True}


def test_a_deadline_ends_a_search_with_what_it_has(llm: LLM):
    prompt = {"prompt_token_ids": PROMPT, "timeout": 1e-6}
    (beams,) = search(llm, prompt)
    assert [(beam.tokens, beam.finish_reason) for beam in beams] == [(PROMPT, "timeout")]


def test_what_does_not_fit_is_refused_before_anything_runs(llm: LLM):
    before = llm.engine.scheduler.num_prefix_queries
    for parameter, fields in (
        ("beam_width", {"beam_width": 11}),
        ("max_tokens", {"max_tokens": 90}),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            search(llm, **fields)
        assert caught.value.parameter == parameter
    with pytest.raises(RequestTooLongError):
        search(llm, max_tokens=1000)
    params = BeamSearchParams(beam_width=2, max_tokens=2)
    for bad, name in ((SamplingParams(), "params"), (None, "params")):
        with pytest.raises(InvalidRequestError, match=name):
            llm.beam_search([PROMPT], bad)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidRequestError, match="lora_request"):
        llm.beam_search([PROMPT], params, lora_request="adapter")
    with pytest.raises(InvalidRequestError, match="concurrency_limit"):
        llm.beam_search([PROMPT], params, concurrency_limit=0)
    params.length_penalty = math.inf
    with pytest.raises(InvalidRequestError, match="length_penalty"):
        llm.beam_search([PROMPT], params)
    assert llm.engine.scheduler.num_prefix_queries == before
