"""Aborts through the engine, in every state of a sequence, on a real tiny model."""

from collections.abc import Sequence

import pytest

from jaxserve.engine import Engine
from jaxserve.request import FinishReason
from tests.engine_runs import (
    add_request,
    assert_idle_and_sane,
    drain,
    final_of,
    generate,
    greedy,
    sampled,
    shared_engine,
    step_until,
    tokens_of,
    with_scheduler,
)
from tests.goldens_loader import load_golden

GOLDEN = load_golden("llama_gqa")
PROMPT = GOLDEN.alone.prompt


@pytest.fixture
def engine() -> Engine:
    return with_scheduler(shared_engine())


def fill(engine: Engine, count: int = 9) -> None:
    """More requests than there are slots."""
    for index in range(count):
        add_request(engine, str(index), GOLDEN.mixed[8].prompt, greedy(60))


def aborted_finals(engine: Engine, request_ids: Sequence[str]) -> None:
    """Abort, drain, and check that each ends once and the others end by length."""
    for request_id in request_ids:
        victims = engine.scheduler._roster.find(request_id, None)
        engine.abort(request_id)
        engine.abort(request_id)
        engine.scheduler.check_invariants()
        for victim in victims:
            # A step in flight still writes its pages.
            assert bool(victim.page_tables[0]) == bool(victim.num_steps_in_flight)
    updates = drain(engine)
    for (request_id, _), of_one in updates.items():
        is_aborted = request_id in request_ids
        reason = FinishReason.ABORT if is_aborted else FinishReason.LENGTH
        assert final_of(of_one).finish_reason is reason
    assert {request_id for request_id, _ in updates} >= set(request_ids)


def sequence(engine: Engine, request_id: str):
    (found,) = engine.scheduler._roster.find(request_id, None)
    return found


def test_an_abort_of_a_waiting_request_frees_everything(engine: Engine) -> None:
    fill(engine)
    engine.step()
    assert sequence(engine, "8") in engine.scheduler._roster.waiting
    aborted_finals(engine, ["8"])
    assert_idle_and_sane(engine)


def test_an_abort_before_the_first_step_frees_everything(engine: Engine) -> None:
    add_request(engine, "r", PROMPT, greedy())
    aborted_finals(engine, ["r"])
    assert_idle_and_sane(engine)


def test_an_abort_between_the_chunks_of_a_prompt_frees_everything() -> None:
    engine = with_scheduler(shared_engine(), long_prefill_token_threshold=7)
    add_request(engine, "long", GOLDEN.mixed[16].prompt, greedy())
    add_request(engine, "other", PROMPT, greedy(9))
    step_until(engine, lambda: sequence(engine, "long").num_computed_tokens > 30)
    assert sequence(engine, "long").num_computed_tokens < len(GOLDEN.mixed[16].prompt)
    aborted_finals(engine, ["long"])
    assert_idle_and_sane(engine)


def test_an_abort_of_decoding_rows_frees_everything(engine: Engine) -> None:
    fill(engine)
    step_until(engine, lambda: sequence(engine, "3").num_output_tokens > 4)
    assert sequence(engine, "3").num_steps_in_flight > 0
    aborted_finals(engine, ["3", "5"])
    assert_idle_and_sane(engine)


def test_an_abort_of_a_preempted_request_frees_everything() -> None:
    engine = with_scheduler(shared_engine(), num_pages=24)
    fill(engine, 6)
    roster = engine.scheduler._roster
    step_until(engine, lambda: any(s.num_preemptions for s in roster.waiting))
    victim = next(s.request.request_id for s in roster.waiting if s.num_preemptions)
    aborted_finals(engine, [victim])
    assert engine.scheduler.num_preemptions > 0
    assert_idle_and_sane(engine)


def test_an_abort_of_everything_in_the_middle_frees_everything() -> None:
    engine = with_scheduler(shared_engine(), num_pages=24)
    fill(engine)
    for _ in range(25):
        engine.step()
    aborted_finals(engine, [str(index) for index in range(9)])
    assert_idle_and_sane(engine)


def test_an_abort_of_one_of_three_samples_leaves_the_other_two(engine: Engine) -> None:
    add_request(engine, "r", PROMPT, sampled(11, n=3))
    roster = engine.scheduler._roster
    first = step_until(engine, lambda: roster.find("r", 1)[0].num_output_tokens > 3)
    engine.abort("r", 1)
    updates = drain(engine)
    assert final_of(updates["r", 1]).finish_reason is FinishReason.ABORT
    for index in (0, 2):
        tokens = tokens_of([u for u in first if u.index == index] + updates["r", index])
        alone = generate(with_scheduler(shared_engine()), [PROMPT], sampled(11 + index))
        assert [tokens] == alone
    assert_idle_and_sane(engine)
