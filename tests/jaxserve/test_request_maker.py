"""RequestMaker: the checked parameters of a call's requests."""

import pytest

from jaxserve.errors import InvalidRequestError, RequestTooLongError
from jaxserve.processing.request_maker import RequestMaker
from jaxserve.processing.sampling_limits import SamplingLimits
from jaxserve.sampling_params import RequestOutputKind, SamplingParams

FINAL = RequestOutputKind.FINAL_ONLY


def make(prompt_lens: list[int], params: SamplingParams | list[SamplingParams]):
    """The requests of prompts of these lengths, for a model of 32 tokens."""
    maker = RequestMaker(
        tokenizer=None,
        limits=SamplingLimits(vocab_size=10, max_model_len=32),
        eos_token_ids=(0,),
        default_params=SamplingParams(),
        chat_template=None,
    )
    submissions = maker.of_prompts([[1] * n for n in prompt_lens], params, FINAL)
    return [request for request, _ in submissions]


def test_each_request_has_the_parameters_given_for_it():
    given = [SamplingParams(max_tokens=n, temperature=t) for n, t in ((4, 0), (4, 0), (5, 1))]
    requests = make([3, 2, 3], given)
    kept = [(r.sampling_params.max_tokens, r.sampling_params.temperature) for r in requests]
    assert kept == [(4, 0), (4, 0), (5, 1)]
    assert all(r.sampling_params.output_kind is FINAL for r in requests)
    assert not any(r.sampling_params is p for r in requests for p in given)


def test_without_max_tokens_each_request_gets_the_room_that_its_prompt_leaves():
    requests = make([5, 3, 4], SamplingParams(max_tokens=None))
    assert [r.sampling_params.max_tokens for r in requests] == [27, 29, 28]


def test_a_longer_prompt_than_the_one_before_is_checked_with_equal_parameters():
    assert len(make([22, 21, 22], SamplingParams(max_tokens=10))) == 3
    with pytest.raises(RequestTooLongError, match="need 33 tokens"):
        make([22, 23], SamplingParams(max_tokens=10))


def test_stop_strings_are_refused_without_a_tokenizer_also_behind_good_ones():
    good, bad = SamplingParams(max_tokens=4), SamplingParams(max_tokens=4, stop="x")
    with pytest.raises(InvalidRequestError, match="stop must be empty when .* no tokenizer"):
        make([3, 3], [good, bad])


def test_parameters_broken_after_they_were_made_are_refused_behind_good_ones():
    good, bad = SamplingParams(max_tokens=4), SamplingParams(max_tokens=4)
    bad.top_p = 2.0
    with pytest.raises(InvalidRequestError, match="top_p"):
        make([3, 3], [good, bad])
