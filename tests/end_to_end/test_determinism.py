"""Tokens depend on the request alone: not on neighbours, chunks, cache hits or preemption."""

import itertools
import random
from functools import cache

import pytest
from msgspec.structs import replace

from jaxserve.engine import Engine
from jaxserve.engine_builder import BuiltEngine
from jaxserve.processing.output_processor import OutputProcessor
from jaxserve.request import Request
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from tests.engine_runs import (
    add_request,
    drain,
    final_of,
    generate,
    make_engine,
    sampled,
    shared_engine,
    tokens_of,
    with_scheduler,
)
from tests.goldens_loader import GOLDENS_FOLDER

NUM_REQUESTS, PAGE_SIZE = 24, 16
NUM_MANY, SMALLEST_MARGIN = 500, 1e-3


@cache
def built_with_host_memory() -> BuiltEngine:
    return make_engine(
        GOLDENS_FOLDER / "llama_gqa", kv_offloading_size=1 / 64, preemption_mode="swap"
    )


@cache
def built_for_whole_prompts() -> BuiltEngine:
    return make_engine(
        GOLDENS_FOLDER / "llama_gqa", max_num_batched_tokens=256, token_buckets=(64, 256)
    )


@cache
def requests(
    num_requests: int = NUM_REQUESTS,
) -> tuple[list[tuple[int, ...]], list[SamplingParams]]:
    """Prompts of 2 to 150 tokens, most of which share a beginning; greedy and seeded."""
    draw = random.Random(3)
    beginnings = [[draw.randrange(3, 120) for _ in range(100)] for _ in range(3)]
    prompts, params = [], []
    for index in range(num_requests):
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


@cache
def many_alone() -> list[tuple[tuple[int, ...], int]]:
    """Each of many requests by itself, whole, without a cache: its tokens, and how many are sure.

    From the first token whose two largest logits are too near each other on, either may come.
    """
    engine, expected = with_scheduler(built_for_whole_prompts(), enable_prefix_caching=False), []
    for prompt, params in zip(*requests(NUM_MANY), strict=True):
        add_request(engine, "alone", prompt, replace(params, logprobs=2))
        updates = drain(engine)["alone", 0]
        best = [of_token.top_logprobs for update in updates for of_token in update.logprobs or ()]
        sure = itertools.takewhile(lambda two: two[0] - two[1] >= SMALLEST_MARGIN, best)
        expected.append((tokens_of(updates), len(list(sure))))
        assert len(best) == len(expected[-1][0]) == params.max_tokens
    return expected


@pytest.mark.slow
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("num_pages", [14, 257])
@pytest.mark.parametrize("is_caching", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 0])
def test_tokens_of_many_depend_on_nothing_but_the_request(
    chunk, is_caching, num_pages, is_streamed
):
    engine = with_scheduler(
        built_for_whole_prompts(),
        num_pages=num_pages,
        enable_prefix_caching=is_caching,
        long_prefill_token_threshold=chunk,
    )
    processor, order = OutputProcessor(None), list(range(NUM_MANY))
    random.Random(f"{chunk} {is_caching} {num_pages} {is_streamed}").shuffle(order)
    kind = RequestOutputKind.DELTA if is_streamed else RequestOutputKind.FINAL_ONLY
    prompts, params = requests(NUM_MANY)
    for i in order:
        wanted = replace(params[i], output_kind=kind)
        request = Request(request_id=f"{i}", prompt_token_ids=prompts[i], sampling_params=wanted)
        processor.add(request)
        engine.add(request)
    parts: list[list[list[int]]] = [[] for _ in order]
    updates = [[] for _ in order]
    while engine.has_unfinished:
        news = engine.step()
        for update in news:
            updates[int(update.request_id)].append(update)
        for output in processor.process(news).outputs:
            parts[int(output.request_id)].append(output.outputs[0].token_ids)
        engine.scheduler.check_invariants()

    num_whole = num_sure = 0
    for got, (tokens, count) in zip(parts, many_alone(), strict=True):
        together = tuple(itertools.chain.from_iterable(got))
        assert together[:count] == tokens[:count] and len(together) == len(tokens)
        assert len(got) > 1 if is_streamed else len(got) == 1
        num_whole, num_sure = num_whole + (count == len(tokens)), num_sure + count
    num_preempted = sum(final_of(of_one).num_preemptions > 0 for of_one in updates)
    print(f"{len(parts)} prompts, {num_whole} of them compared to their ends, {num_sure} tokens")
    print(f"{num_preempted} of them preempted, {engine.scheduler.num_prefix_hits} tokens found")
    assert len(parts) == NUM_MANY and num_whole >= 0.95 * NUM_MANY
    assert num_preempted >= 5 if num_pages == 14 else num_preempted == 0
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
