"""The pure algorithm against a plain loop over arrays, and against all sequences there are."""

import itertools
import math
from collections.abc import Collection
from typing import Any

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.outputs import Logprob
from jaxserve.processing.beam_search import Beam, BeamRules, BeamSearchState, advance, end
from jaxserve.sampling_params import BeamSearchParams
from tests.jaxserve.table_model import TableModel, plain_beam_search, score

PROMPT = (3, 1, 4)
LIMIT = 1000


def rules_of(
    eos_token_ids: Collection[int] = (0,), max_logprobs: int = LIMIT, **fields: Any
) -> BeamRules:
    given: dict[str, Any] = {"beam_width": 2, "max_tokens": 4}
    params = BeamSearchParams(**(given | fields))
    return BeamRules.of(
        params,
        num_prompt_tokens=len(PROMPT),
        eos_token_ids=eos_token_ids,
        max_logprobs=max_logprobs,
    )


def run(model: TableModel, rules: BeamRules) -> tuple[tuple[Beam, ...], int]:
    """The best beams, and the steps that it took to find them."""
    state, num_steps = BeamSearchState(), 0
    while state.live:
        lasts = [(PROMPT + beam.token_ids)[-1] for beam in state.live]
        assert len(set(beam.token_ids for beam in state.live)) == len(lasts) <= rules.beam_width
        state = advance(state, [model.top(last, rules.num_candidates) for last in lasts], rules)
        num_steps += 1
    return state.ended, num_steps


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize(
    ("beam_width", "ends"), [(1, (0,)), (3, (0,)), (4, (0, 2)), (2, (5, 6, 7))]
)
def test_it_finds_what_a_plain_loop_to_the_last_step_finds(beam_width, ends, ignore_eos, penalty):
    num_stopped = 0
    for seed in range(12):
        model = TableModel(12, seed)
        rules = rules_of(
            ends,
            beam_width=beam_width,
            max_tokens=9,
            ignore_eos=ignore_eos,
            length_penalty=penalty,
        )
        beams, _ = run(model, rules)
        expected = plain_beam_search(
            model,
            PROMPT,
            beam_width=beam_width,
            max_tokens=9,
            num_candidates=rules.num_candidates,
            penalty=penalty,
            ends=frozenset(ends),
            ignore_eos=ignore_eos,
        )
        assert [(beam.token_ids, beam.cum_logprob) for beam in beams] == expected
        for beam in beams:
            has_ended = not ignore_eos and beam.token_ids[-1] in ends
            assert beam.finish_reason == ("stop" if has_ended else "length")
            assert beam.stop_reason == (beam.token_ids[-1] if has_ended else None)
            assert len(beam.entries) == len(beam.token_ids) <= 9
            num_stopped += has_ended
    assert num_stopped == 0 if ignore_eos else num_stopped > 0 or penalty > 1


@pytest.mark.parametrize("penalty", [-0.5, 0.0, 1.0, 2.0])
def test_a_beam_as_wide_as_the_tree_finds_the_best_of_all_sequences(penalty):
    model, size, length = TableModel(5, seed=3), 5, 4
    every: dict[tuple[int, ...], float] = {}
    for num_tokens in range(1, length + 1):
        for tokens in itertools.product(range(size), repeat=num_tokens):
            if 0 in tokens[:-1] or (num_tokens < length and tokens[-1] != 0):
                continue
            pairs = zip((PROMPT[-1], *tokens), tokens, strict=False)
            logprob = sum(float(model.logprobs[pair]) for pair in pairs)
            counted = len(PROMPT) + num_tokens - (tokens[-1] == 0)
            every[tokens] = score(logprob, counted, penalty)
    beams, _ = run(model, rules_of(beam_width=4**length, max_tokens=length, length_penalty=penalty))
    best = sorted(every.values(), reverse=True)
    # By their scores: sequences of the same transitions in another order are equally good.
    assert [every[beam.token_ids] for beam in beams] == pytest.approx(best[: len(beams)])


def test_a_wide_beam_finds_what_a_greedy_one_misses():
    scores = []
    for width in (1, 4):
        beams, _ = run(TableModel(12, seed=1), rules_of((), beam_width=width, max_tokens=6))
        scores.append(beams[0].cum_logprob)
    assert scores[1] > scores[0]


def test_the_length_penalty_chooses_between_short_and_long():
    lengths: dict[float, int] = {}
    for penalty in (-2.0, 4.0):
        beams, _ = run(TableModel(8, seed=5), rules_of(max_tokens=12, length_penalty=penalty))
        lengths[penalty] = len(beams[0].token_ids)
    assert lengths[-2.0] < lengths[4.0]


def test_it_stops_when_nothing_that_lives_can_win():
    likely_end = {0: Logprob(math.log(0.9), 1), 1: Logprob(math.log(0.06), 2)}
    others = {2: Logprob(math.log(0.03), 3), 3: Logprob(math.log(0.01), 4)}
    rules = rules_of(beam_width=1, max_tokens=50, length_penalty=0.0)
    state = advance(BeamSearchState(), [likely_end | others], rules)
    assert not state.live and [beam.token_ids for beam in state.ended] == [(0,)]
    patient = rules_of(beam_width=1, max_tokens=50, length_penalty=2.0)
    assert advance(BeamSearchState(), [likely_end | others], patient).live


def test_equal_beams_keep_the_order_of_parents_and_ranks():
    equal = {7: Logprob(-1.0, 1), 5: Logprob(-1.0, 2), 6: Logprob(-1.0, 3), 4: Logprob(-1.0, 4)}
    rules = rules_of((), beam_width=3, max_tokens=2)
    state = advance(BeamSearchState(), [dict(reversed(equal.items()))], rules)
    assert [beam.token_ids for beam in state.live] == [(7,), (5,), (6,)]
    state = advance(state, [equal] * 3, rules)
    assert [beam.token_ids for beam in state.ended] == [(7, 7), (7, 5), (7, 6)]


def test_what_cannot_follow_is_no_candidate():
    entries = {1: Logprob(-0.1, 1), 2: Logprob(-math.inf, 2), 0: Logprob(-math.inf, 3)}
    state = advance(BeamSearchState(), [entries], rules_of())
    assert [beam.token_ids for beam in state.live] == [(1,)] and not state.ended


def test_a_token_that_is_not_among_the_most_likely_is_no_candidate():
    entries = {9: Logprob(-3.0, 70), **{i: Logprob(-i / 10, i) for i in range(1, 5)}}
    state = advance(BeamSearchState(), [entries], rules_of(beam_width=2, max_tokens=1))
    assert [beam.token_ids for beam in state.ended] == [(1,), (2,)]


def test_an_end_from_outside_ranks_all_beams_there_are():
    model, rules = TableModel(12, seed=2), rules_of(beam_width=3, max_tokens=9)
    state = BeamSearchState()
    for _ in range(2):
        lasts = [(PROMPT + beam.token_ids)[-1] for beam in state.live]
        state = advance(state, [model.top(last, 6) for last in lasts], rules)
    ended = end(state, "timeout", rules)
    both = [*state.ended, *state.live]
    expected = sorted(both, key=rules.score, reverse=True)[:3]
    assert [beam.token_ids for beam in ended.ended] == [beam.token_ids for beam in expected]
    assert not ended.live and "timeout" in {beam.finish_reason for beam in ended.ended}


def test_candidates_are_twice_the_width_or_more_where_many_tokens_end():
    assert rules_of((0,), beam_width=3).num_candidates == 6
    assert rules_of((0, 1, 2, 3), beam_width=1).num_candidates == 5
    assert rules_of((0, 1, 2, 3), beam_width=1, ignore_eos=True).num_candidates == 2
    assert rules_of(range(30), beam_width=2, max_logprobs=20).num_candidates == 20


def test_a_beam_that_is_too_wide_is_refused_by_name():
    assert rules_of(beam_width=10, max_logprobs=20).beam_width == 10
    with pytest.raises(InvalidRequestError, match="beam_width must be at most 10: .* got 11") as e:
        rules_of(beam_width=11, max_logprobs=20)
    assert e.value.parameter == "beam_width"


@pytest.mark.parametrize("penalty", [1e6, -1e6])
def test_a_penalty_past_every_float_still_gives_beams(penalty):
    beams, _ = run(TableModel(12, seed=0), rules_of(length_penalty=penalty))
    assert len(beams) == 2
