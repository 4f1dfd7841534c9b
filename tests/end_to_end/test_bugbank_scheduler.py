"""Faults of other engines' schedulers and caches, each as a test on a real tiny model."""

import random
from functools import cache

import pytest

from jaxserve.engine import Engine
from jaxserve.errors import InvalidRequestError, RequestTooLongError
from jaxserve.processing.sampling_limits import refuse_unsupported
from jaxserve.request import FinishReason
from jaxserve.sampling_params import SamplingParams
from tests.engine_runs import (
    add_request,
    drain,
    final_of,
    generate,
    greedy,
    sampled,
    shared_engine,
    tokens_of,
    with_scheduler,
)

pytestmark = pytest.mark.bugbank
PREFIX = tuple(range(3, 83))


def assert_nothing_is_held(engine: Engine) -> None:
    scheduler = engine.scheduler
    scheduler.check_invariants()
    assert not engine.has_unfinished and scheduler.kv_cache_usage == 0
    roster = scheduler._roster
    assert roster.slot_pool.num_free == roster.slot_pool.max_num_seqs
    assert not roster.prefixes._promised


@cache
def answer_alone(prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    engine = with_scheduler(shared_engine(), enable_prefix_caching=False)
    return generate(engine, [prompt], greedy(max_tokens))[0]


def test_bugbank_R08_a_prompt_larger_than_the_pool_is_refused_and_holds_nobody_up():
    engine = with_scheduler(shared_engine(), num_pages=9)
    with pytest.raises(RequestTooLongError, match="KV cache of 128 tokens"):
        add_request(engine, "large", tuple(range(3, 103)) * 2, greedy(4))
    small = tuple(range(3, 13))
    assert generate(engine, [small], greedy(4)) == [answer_alone(small, 4)]


def test_bugbank_R42_prompt_logprobs_would_not_read_the_cache_and_are_refused_for_now():
    params = SamplingParams(prompt_logprobs=1)
    assert params.skip_reading_prefix_cache is True
    with pytest.raises(InvalidRequestError, match="prompt_logprobs"):
        refuse_unsupported(params)


def test_bugbank_R44_under_pressure_no_answer_holds_anything_of_another():
    draw = random.Random(7)
    prompts = [tuple(draw.randrange(3, 120) for _ in range(40)) for _ in range(48)]
    engine = with_scheduler(shared_engine(), num_pages=24)
    assert generate(engine, prompts, greedy(40)) == [answer_alone(p, 40) for p in prompts]
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("num_pages", range(6, 13))
def test_bugbank_R45_tokens_survive_preemption_whatever_the_pool(num_pages):
    prompts = [tuple(range(3, 37)), tuple(range(40, 74))]
    engine = with_scheduler(shared_engine(), num_pages=num_pages)
    assert generate(engine, prompts, greedy(35)) == [answer_alone(p, 35) for p in prompts]
    assert (engine.scheduler.num_preemptions > 0) is (7 <= num_pages <= 9)


def test_bugbank_R46_a_client_that_leaves_spoils_nothing_for_the_next_turn():
    engine = with_scheduler(shared_engine())
    for turn in range(20):
        prompt = (*PREFIX, turn + 3)
        add_request(engine, f"left {turn}", prompt, greedy(50))
        while not any(update.new_token_ids for update in engine.step()):
            pass
        engine.abort(f"left {turn}")
        add_request(engine, f"next {turn}", prompt, greedy(6))
        updates = drain(engine)
        assert tokens_of(updates[f"next {turn}", 0]) == answer_alone(prompt, 6)
        assert final_of(updates[f"left {turn}", 0]).finish_reason is FinishReason.ABORT
        assert_nothing_is_held(engine)
    assert engine.scheduler.num_prefix_hits > 0


def test_bugbank_R47_slots_return_after_every_abort():
    engine, draw = with_scheduler(shared_engine(), max_num_seqs=4), random.Random(8)
    living: list[str] = []
    for number in range(150):
        add_request(engine, str(number), (*PREFIX[: draw.randrange(1, 80)], 5), sampled(number))
        living.append(str(number))
        for _ in range(draw.randrange(3)):
            engine.step()
        if len(living) > 6 or draw.random() < 0.5:
            engine.abort(living.pop(draw.randrange(len(living))))
    for request_id in living:
        engine.abort(request_id)
    drain(engine)
    assert_nothing_is_held(engine)
    prompts = [(*PREFIX, token) for token in (3, 4, 5, 6)]
    assert generate(engine, prompts, greedy(6)) == [answer_alone(p, 6) for p in prompts]


@pytest.mark.parametrize("how", ["abort", "timeout"])
def test_bugbank_R48_leaving_the_queue_leaves_nothing_of_a_hit_behind(how):
    engine = with_scheduler(shared_engine(), max_num_seqs=2)
    generate(engine, [PREFIX], greedy(2))
    options = {"timeout_seconds": 0.0} if how == "timeout" else {}
    for number in range(2):
        add_request(engine, f"runs {number}", (*PREFIX, number + 3), greedy(20))
    engine.step()
    for number in range(40):
        add_request(engine, f"waits {number}", (*PREFIX, number + 3), greedy(20), **options)
    if how == "abort":
        for number in range(40):
            engine.abort(f"waits {number}")
    updates = drain(engine)
    reasons = {final_of(of_one).finish_reason for of_one in updates.values()}
    ended = FinishReason.ABORT if how == "abort" else FinishReason.TIMEOUT
    assert reasons == {ended, FinishReason.LENGTH}
    assert_nothing_is_held(engine)
