"""Several decode steps in one dispatch, on a real tiny model: the tokens stay what they are."""

import functools
from dataclasses import replace

import numpy as np
import pytest

from jaxserve.engine import Engine
from jaxserve.engine_builder import BuiltEngine
from jaxserve.execution import engine_plan, limits
from jaxserve.execution.buckets import Bucket, BucketTable, make_bucket_table
from jaxserve.request import FinishReason
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.page_pool import PagePool
from tests.engine_runs import (
    add_request,
    drain,
    final_of,
    generate,
    greedy,
    make_engine,
    sampled,
    shared_engine,
    step_until,
    tokens_of,
    with_scheduler,
)
from tests.goldens_loader import load_golden
from tests.jaxserve.scheduler_builders import make_scheduler, make_sequence
from tests.jaxserve.simulated_engine import SimulatedEngine

GOLDEN = load_golden("llama_gqa")
PROMPTS = [case.prompt for case in GOLDEN.mixed[:6]]
W = 4


@functools.cache
def built() -> BuiltEngine:
    return make_engine(GOLDEN.folder, num_scheduler_steps=W, row_buckets=(2, 8))


def multi_step_engine(**limits) -> Engine:
    return with_scheduler(built(), **limits)


def single_step_tokens(prompts, params) -> list[tuple[int, ...]]:
    return generate(with_scheduler(shared_engine()), prompts, params)


def count_steps(engine: Engine, prompts, params) -> int:
    before = engine.times.num_steps
    generate(engine, prompts, params)
    return engine.times.num_steps - before


@pytest.mark.parametrize("max_steps_in_flight", [1, 3])
def test_rows_of_any_length_get_their_tokens(max_steps_in_flight: int) -> None:
    params = [greedy(1), greedy(2), sampled(3, max_tokens=4), greedy(5), sampled(9), greedy(23)]
    engine = with_scheduler(built(), max_steps_in_flight=max_steps_in_flight)
    assert generate(engine, PROMPTS, params) == single_step_tokens(PROMPTS, params)


def test_four_steps_are_one_dispatch_and_the_rest_are_single() -> None:
    # One token comes with the prompt. Of 1 + 4 * n + 2 the last two, half of four, come one by one.
    assert count_steps(multi_step_engine(), PROMPTS[:1], greedy(1 + 8)) == 1 + 2
    assert count_steps(multi_step_engine(), PROMPTS[:1], greedy(1 + 8 + 2)) == 1 + 2 + 2
    assert count_steps(multi_step_engine(), PROMPTS[:1], greedy(1 + 8 + 3)) == 1 + 2 + 1
    assert count_steps(with_scheduler(shared_engine()), PROMPTS[:1], greedy(9)) == 9


@pytest.mark.parametrize("place", range(1, 7))
def test_an_end_within_the_steps_ends_there(place: int) -> None:
    (tokens,) = single_step_tokens(PROMPTS[:1], greedy(12))
    stop = tokens[place]
    end = tokens.index(stop)
    params = greedy(40, stop_token_ids=[stop])
    engine = multi_step_engine()
    for index, prompt in enumerate(PROMPTS[:2]):
        add_request(engine, str(index), prompt, params if index == 0 else greedy(12))
    updates = drain(engine)
    assert tokens_of(updates["0", 0]) == tokens[: end + 1]
    assert final_of(updates["0", 0]).finish_reason is FinishReason.STOP
    assert tokens_of(updates["1", 0]) == single_step_tokens(PROMPTS[1:2], greedy(12))[0]


@pytest.mark.parametrize("other", [sampled(3, logprobs=2), sampled(3, min_tokens=6)])
def test_what_needs_each_step_takes_all_rows_along(other: SamplingParams) -> None:
    params = [greedy(9), other]
    assert generate(multi_step_engine(), PROMPTS[:2], params) == single_step_tokens(
        PROMPTS[:2], params
    )
    assert count_steps(multi_step_engine(), PROMPTS[1:2], other) == other.max_tokens


def test_a_request_that_comes_later_is_admitted_after_the_steps_in_flight() -> None:
    engine = multi_step_engine()
    add_request(engine, "first", PROMPTS[0], greedy(40))
    updates = step_until(engine, lambda: engine.times.num_tokens > len(PROMPTS[0]) + 2 * W)
    add_request(engine, "late", PROMPTS[1], greedy(8))
    steps_before = engine.times.num_steps
    updates += step_until(engine, lambda: engine.scheduler.num_running == 2)
    assert engine.times.num_steps <= steps_before + 2
    rest = drain(engine)
    first = [*(u for u in updates if u.request_id == "first"), *rest["first", 0]]
    assert tokens_of(first) == single_step_tokens(PROMPTS[:1], greedy(40))[0]
    assert tokens_of(rest["late", 0]) == single_step_tokens(PROMPTS[1:2], greedy(8))[0]


def test_preempted_rows_and_cached_prefixes_give_the_same_tokens() -> None:
    params = greedy(40)
    wanted = single_step_tokens(PROMPTS, params)
    for caching in (False, True):
        engine = with_scheduler(built(), num_pages=16, enable_prefix_caching=caching)
        assert generate(engine, PROMPTS, params) == wanted
        assert engine.scheduler.num_preemptions > 0
        assert generate(engine, PROMPTS, params) == wanted


def test_no_free_page_is_read() -> None:
    engine = make_engine(GOLDEN.folder, num_scheduler_steps=W, debug_poison_pages=True).engine
    assert generate(engine, PROMPTS, greedy(33)) == single_step_tokens(PROMPTS, greedy(33))


def test_logits_that_are_not_finite_end_one_row() -> None:
    engine = make_engine(GOLDEN.folder, num_scheduler_steps=W).engine
    for index, prompt in enumerate(PROMPTS[:2]):
        add_request(engine, str(index), prompt, greedy(30))
    step_until(engine, lambda: engine.scheduler.num_running == 2 and engine.times.num_steps > 2)
    page = engine.scheduler.page_tables()["0", 0][0][0]
    group = engine.runner.cache.groups[0]
    poisoned = replace(group, k_pages=group.k_pages.at[:, page].set(np.nan))
    engine.runner.change_cache(lambda cache: cache.with_group(0, poisoned))
    updates = drain(engine)
    assert final_of(updates["0", 0]).finish_reason is FinishReason.ERROR
    assert final_of(updates["1", 0]).finish_reason is FinishReason.LENGTH


def multi_step_table(*, short_context: int = 0, short_context_rows: int = 0) -> BucketTable:
    return make_bucket_table(
        max_num_seqs=32,
        max_num_batched_tokens=64,
        small_row_buckets=(1, 8),
        small_sampler_rows=16,
        num_scheduler_steps=W,
        multi_step_rows=8,
        short_context=short_context,
        short_context_rows=short_context_rows,
    )


def test_only_small_buckets_have_several_steps() -> None:
    table = multi_step_table()
    several = [bucket for bucket in table.all() if bucket.num_steps > 1]
    assert several == [Bucket(1, 1, True, W), Bucket(8, 8, True, W)]
    assert str(several[0]) == "decode[T=1,S=1,W=4]"
    assert table.select(6, 3, is_decode_only=True, num_steps=2) == several[1]
    with pytest.raises(ValueError, match="no bucket holds 5 steps of 3"):
        table.select(15, 3, is_decode_only=True, num_steps=5)
    with pytest.raises(ValueError, match="no bucket holds 2 steps of 9"):
        table.select(18, 9, is_decode_only=True, num_steps=2)


def test_short_contexts_have_a_program_of_all_steps_that_one_dispatch_can() -> None:
    table = multi_step_table(short_context=48, short_context_rows=1)
    short = Bucket(1, 1, True, W, 48)
    assert [bucket for bucket in table.all() if bucket.max_context] == [short]
    assert str(short) == "decode[T=1,S=1,W=4,context=48]"

    def select(num_rows: int, num_steps: int, context: int) -> Bucket:
        return table.select(
            num_rows, num_rows, is_decode_only=True, num_steps=num_steps, context=context
        )

    assert select(1, W, 48) == short
    assert select(1, W, 49) == Bucket(1, 1, True, W)
    assert select(1, 1, 48) == Bucket(1, 1, True)
    assert select(2, W, 48) == Bucket(8, 8, True, W)


@pytest.mark.parametrize("num_steps", [1, W])
def test_a_sequence_grows_out_of_the_program_for_short_contexts(num_steps, monkeypatch) -> None:
    monkeypatch.setattr(limits, "MAX_FUSED_CONTEXT", 48)
    monkeypatch.setattr(
        engine_plan,
        "choose_buckets",
        lambda *args, **options: limits.choose_buckets(
            *args, **options | {"fuses_attention": True}
        ),
    )
    folder, prompt = GOLDEN.folder, PROMPTS[0][:20]
    engine = make_engine(folder, num_scheduler_steps=num_steps, row_buckets=(1, 8)).engine
    assert generate(engine, [prompt], greedy(50)) == single_step_tokens([prompt], greedy(50))
    used = {key[1] for key in engine.runner._programs._programs if key[0] == "decode"}
    assert Bucket(1, 1, True, num_steps, 48) in used and Bucket(1, 1, True, num_steps) in used
    assert all(bucket.num_rows == 1 for bucket in used if isinstance(bucket, Bucket))


def test_the_next_turn_finds_as_many_tokens_however_many_steps_a_dispatch_ran() -> None:
    prompt, found = PROMPTS[0][:20], []
    for num_steps in (1, W):
        built = make_engine(
            GOLDEN.folder, num_scheduler_steps=num_steps, max_num_batched_tokens=128
        )  # fmt: skip
        found.append([])
        for length in range(11, 30, 2):
            engine = with_scheduler(built)
            engine.scheduler.reset_prefix_cache()
            (answer,) = generate(engine, [prompt], greedy(length))
            add_request(engine, "next", [*prompt, *answer, 7, 8, 9], greedy(1))
            found[-1].append(final_of(drain(engine)["next", 0]).num_cached_tokens)
    assert found[0] == found[1]
    assert found[0][-1] == len(prompt) + 28


@pytest.mark.parametrize("num_usable", [7, 8, 14])
def test_a_step_of_several_tokens_a_row_preempts_and_admits_nobody(num_usable: int) -> None:
    pool = PagePool(1 + num_usable, 2)
    scheduler = make_scheduler(
        pools=(pool,), max_decode_row_tokens=4, max_num_seqs=2, max_steps_in_flight=1
    )
    engine = SimulatedEngine(scheduler)
    engine.add(make_sequence("a", 2, 11), make_sequence("b", 2, 11))
    widths = set[int]()
    while scheduler.has_unfinished:
        preempted, num_free = scheduler.num_preemptions, pool.num_free
        output = engine.dispatch()
        if output is not None and any(row.is_decode for row in output.rows):
            widths.add(max(row.num_scheduled_tokens for row in output.rows))
            if max(row.num_scheduled_tokens for row in output.rows) > 1:
                assert num_free >= 2 * len(output.rows) and scheduler.num_preemptions == preempted
                assert all(row.is_decode for row in output.rows)
        engine.collect()
    assert widths >= {1, 4} and (scheduler.num_preemptions > 0) is (num_usable < 14)


def test_row_buckets_without_a_small_one_have_no_program_of_several_steps(caplog) -> None:
    built = make_engine(GOLDEN.folder, num_scheduler_steps=W, max_num_seqs=16, row_buckets=(16,))
    assert "num_scheduler_steps needs a row bucket of at most 8 rows" in caplog.text
    config = built.engine.scheduler._config
    assert (config.max_decode_row_tokens, config.max_multi_token_rows) == (1, 0)
