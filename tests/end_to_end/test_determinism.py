"""Tokens depend on the request alone: not on neighbours, chunks, cache hits or preemption."""

import random
from functools import cache

import pytest

from jaxserve.engine import Engine
from jaxserve.engine_builder import BuiltEngine
from jaxserve.sampling_params import SamplingParams
from tests.engine_runs import (
    add_request,
    drain,
    generate,
    make_engine,
    sampled,
    shared_engine,
    tokens_of,
    with_scheduler,
)
from tests.goldens_loader import GOLDENS_FOLDER

NUM_REQUESTS, PAGE_SIZE = 24, 16


@cache
def built_with_host_memory() -> BuiltEngine:
    return make_engine(
        GOLDENS_FOLDER / "llama_gqa", kv_offloading_size=1 / 64, preemption_mode="swap"
    )


@cache
def requests() -> tuple[list[tuple[int, ...]], list[SamplingParams]]:
    """Prompts of 2 to 150 tokens, most of which share a beginning; greedy and seeded."""
    draw = random.Random(3)
    beginnings = [[draw.randrange(3, 120) for _ in range(100)] for _ in range(3)]
    prompts, params = [], []
    for index in range(NUM_REQUESTS):
        shared = draw.choice(beginnings)[: draw.choice([0, 7, 40, 64, 100])]
        rest = [draw.randrange(3, 120) for _ in range(draw.randrange(2, 50))]
        prompts.append((*shared, *rest))
        settings = {"temperature": draw.choice([0.0, 0.8, 1.2]), "top_p": 0.9, "top_k": 20}
        params.append(sampled(seed=index, max_tokens=draw.randrange(4, 30), **settings))
    return prompts, params


@cache
def alone() -> list[tuple[int, ...]]:
    """Each request by itself, without a cache."""
    engine = with_scheduler(shared_engine(), enable_prefix_caching=False)
    return [generate(engine, [prompt], [p])[0] for prompt, p in zip(*requests(), strict=True)]


def run_together(engine: Engine, order: list[int] | None = None) -> list[tuple[int, ...]]:
    prompts, params = requests()
    for index in order or range(NUM_REQUESTS):
        add_request(engine, str(index), prompts[index], params[index])
    updates = drain(engine)
    return [tokens_of(updates[str(index), 0]) for index in range(NUM_REQUESTS)]


@pytest.mark.parametrize("threshold", [0, 1, 7])
@pytest.mark.parametrize("is_caching", [False, True])
def test_tokens_do_not_depend_on_chunks_and_cache_hits(is_caching, threshold):
    engine = with_scheduler(
        shared_engine(),
        enable_prefix_caching=is_caching,
        long_prefill_token_threshold=threshold,
    )
    assert run_together(engine) == alone()
    assert (engine.scheduler.num_prefix_hits > 0) is is_caching


def test_tokens_do_not_depend_on_the_order():
    order = list(range(NUM_REQUESTS))
    random.Random(4).shuffle(order)
    assert run_together(with_scheduler(shared_engine()), order) == alone()


@pytest.mark.parametrize("is_caching", [False, True])
def test_tokens_survive_preemption(is_caching):
    engine = with_scheduler(shared_engine(), num_pages=20, enable_prefix_caching=is_caching)
    assert run_together(engine) == alone()
    assert engine.scheduler.num_preemptions > 0


def test_tokens_survive_a_trip_to_the_host():
    engine = with_scheduler(built_with_host_memory(), num_pages=20)
    assert run_together(engine) == run_together(engine) == alone()
    assert engine.scheduler.num_preemptions > 0
    mover = engine.runner.page_mover
    assert mover is not None and mover.num_offloaded_bytes > 0 and mover.num_fetched_bytes > 0


def test_a_prefix_is_computed_once_by_all_who_come_at_once():
    engine = with_scheduler(shared_engine())
    prefix, draw = list(range(3, 3 + 6 * PAGE_SIZE)), random.Random(5)
    prompts = [(*prefix, *(draw.randrange(3, 120) for _ in range(5))) for _ in range(8)]
    before = engine.times.num_tokens
    outputs = generate(engine, prompts, sampled(max_tokens=4))
    num_computed = engine.times.num_tokens - before
    assert num_computed == len(prefix) + len(prompts) * (5 + 3)
    assert len(set(outputs)) > 1


def test_another_salt_shares_nothing():
    engine, prompt = with_scheduler(shared_engine()), tuple(range(3, 60))
    for index, salt in enumerate(["a", "b", None]):
        add_request(engine, str(index), prompt, sampled(max_tokens=2), cache_salt=salt)
        drain(engine)
    assert engine.scheduler.num_prefix_hits == 0
    add_request(engine, "again", prompt, sampled(max_tokens=2), cache_salt="b")
    drain(engine)
    assert engine.scheduler.num_prefix_hits == len(prompt) - 1


def test_bugbank_R45_F05_a_pool_of_seven_pages_finishes_two_long_requests():
    engine = with_scheduler(shared_engine(), num_pages=8)
    prompts = [tuple(range(3, 37)), tuple(range(40, 74))]
    params = sampled(max_tokens=35, temperature=0.0)
    expected = [generate(with_scheduler(shared_engine()), [p], params)[0] for p in prompts]
    assert generate(engine, prompts, params) == expected
    assert engine.scheduler.num_preemptions > 0
