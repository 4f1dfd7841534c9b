"""`prefill_first`: decode rows wait while prompts fill whole steps, and only then."""

import random
from collections import deque

import pytest

from jaxserve.scheduling import held_decodes
from tests.jaxserve.scheduler_builders import (
    TOKEN,
    commit,
    expected_output,
    make_scheduler,
    make_sequence,
    schedule,
    sizes,
)
from tests.jaxserve.simulated_engine import SimulatedEngine


def scheduler_with_decoding(num_waiting: int, num_prompt_tokens: int = 4, **limits):
    """One sequence decodes and others wait; a step takes 8 tokens."""
    limits = {"max_num_batched_tokens": 8, "token_buckets": (16,), "max_num_seqs": 8, **limits}
    scheduler = make_scheduler(prefill_first=True, max_steps_in_flight=4, **limits)
    scheduler.add(make_sequence("decoding", 4))
    is_decoding = False
    while not is_decoding:
        output = schedule(scheduler)
        is_decoding = output.rows[0].can_sample
        commit(scheduler, output, [TOKEN] if is_decoding else [])
    for index in range(num_waiting):
        scheduler.add(make_sequence(f"w{index}", num_prompt_tokens, seed=index + 1))
    return scheduler


def test_prompts_that_fill_steps_hold_decoding_back_and_then_all_decode():
    scheduler = scheduler_with_decoding(4)
    for names in (("w0", "w1"), ("w2", "w3")):
        output = schedule(scheduler)
        assert sizes(output) == dict.fromkeys(names, 4) and output.num_decode_rows == 0
        commit(scheduler, output, [TOKEN], [TOKEN])
    output = schedule(scheduler)
    assert output.num_decode_rows == len(output.rows) == 5


def test_a_long_prompt_that_runs_counts_with_those_that_wait():
    scheduler = scheduler_with_decoding(1, 20)
    assert sizes(schedule(scheduler)) == {"w0": 8}
    scheduler.add(make_sequence("late", 2))
    assert sizes(schedule(scheduler)) == {"w0": 8}
    assert sizes(schedule(scheduler)) == {"decoding": 1, "w0": 4, "late": 2}


@pytest.mark.parametrize(
    "limits",
    [
        {"num_waiting": 1},
        {"num_waiting": 4, "max_num_seqs": 2},
        {"num_waiting": 4, "num_pages": 4, "max_num_batched_tokens": 12},
        {"num_waiting": 4, "long_prefill_token_threshold": 1},
        {"num_waiting": 4, "prefill_first": False},
    ],
    ids=["few tokens", "no slots", "no pages", "the threshold", "not asked for"],
)
def test_prompts_that_do_not_fill_a_step_share_it(limits):
    prefill_first = limits.pop("prefill_first", True)
    scheduler = scheduler_with_decoding(**limits)
    object.__setattr__(scheduler._config, "prefill_first", prefill_first)
    output = schedule(scheduler)
    assert output.num_decode_rows == 1


def test_decoding_goes_on_when_no_prompt_finds_room_after_all():
    scheduler = scheduler_with_decoding(4, watermark=0.99)
    assert sizes(schedule(scheduler)) == {"decoding": 1}


def test_tokens_that_are_found_in_the_cache_fill_no_step():
    scheduler = scheduler_with_decoding(0, enable_prefix_caching=True, max_num_seqs=8)
    known = make_sequence("known", 16, 2, shared=(9, 16))
    scheduler.add(known)
    while known.finish_reason is None:
        output = schedule(scheduler)
        commit(scheduler, output, *([TOKEN] if row.can_sample else [] for row in output.rows))
    for index in range(4):
        scheduler.add(make_sequence(f"w{index}", 17, seed=index + 1, shared=(9, 16)))
    output = schedule(scheduler)
    assert sizes(output) == {"decoding": 1, "w0": 1, "w1": 1, "w2": 1, "w3": 1}


def steps_of(seed: int, *, in_parts: bool) -> list[list[tuple[str, int, int]]]:
    """Steps of random requests, which come at once, or as `LLM.generate` hands them over."""
    draw = random.Random(seed)
    slots, budget = draw.choice([2, 4, 8]), draw.choice([8, 16])
    scheduler = make_scheduler(
        draw.choice([30, 60, 200]),
        prefill_first=True,
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        token_buckets=(4, 8, 16),
    )
    most = scheduler.lookahead_tokens
    assert most is not None
    parts, part = deque(), []
    for index in range(draw.randint(5, 40)):
        part.append(make_sequence(f"s{index}", draw.randint(1, 20), draw.randint(1, 9), seed=index))
        if in_parts and sum(sequence.num_prompt_tokens for sequence in part) > most:
            parts.append(part)
            part = []
    parts.append(part)
    in_flight, steps = deque(), []
    while parts or scheduler.has_unfinished:
        for sequence in parts.popleft() if parts else ():
            scheduler.add(sequence)
        while (output := scheduler.schedule()) is not None:
            in_flight.append(output)
            rows = output.rows
            steps.append([(row.sequence.request.request_id, row.start, row.num_scheduled_tokens)
                          for row in rows])  # fmt: skip
        output = in_flight.popleft()
        commit(scheduler, output, *([TOKEN] if row.can_sample else [] for row in output.rows))
    return steps


@pytest.mark.parametrize("seed", range(40))
def test_requests_in_parts_have_the_schedule_of_all_at_once(seed):
    assert steps_of(seed, in_parts=True) == steps_of(seed, in_parts=False)


def test_endless_requests_for_one_token_cannot_hold_decoding_for_ever(monkeypatch):
    monkeypatch.setattr(held_decodes, "MAX_HELD_STEPS", 3)
    scheduler = scheduler_with_decoding(0)
    num_decoded = []
    for step in range(8):
        for part in range(4):
            scheduler.add(make_sequence(f"{step}.{part}", 4, max_tokens=1, seed=step))
        output = schedule(scheduler)
        num_decoded.append(output.num_decode_rows)
        commit(scheduler, output, *([TOKEN] if row.can_sample else [] for row in output.rows))
    assert num_decoded == [0, 0, 0, 1, 0, 0, 0, 1]


@pytest.mark.parametrize("num_pages", [12, 40, 101])
def test_all_get_their_tokens_whatever_the_memory(num_pages):
    scheduler = make_scheduler(
        num_pages, prefill_first=True, max_num_batched_tokens=16, max_num_seqs=8
    )
    sequences = [make_sequence(f"r{i}", 3 + 5 * (i % 4), 9, seed=i) for i in range(20)]
    engine = SimulatedEngine(scheduler)
    engine.add(*sequences)
    engine.drain()
    for index in range(20):
        fresh = make_sequence(f"r{index}", 3 + 5 * (index % 4), 9, seed=index)
        assert engine.output_of(f"r{index}") == expected_output(fresh)[0]
