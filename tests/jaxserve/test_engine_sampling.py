"""Sampling and log-probabilities through the engine, on a real tiny model."""

from collections.abc import Sequence

import numpy as np
import pytest

from jaxserve.engine import Engine
from jaxserve.sampling_params import SamplingParams
from tests.engine_runs import (
    add_request,
    drain,
    generate,
    greedy,
    sampled,
    shared_engine,
    tokens_of,
    with_scheduler,
)
from tests.goldens_loader import load_golden

GOLDEN = load_golden("llama_gqa")
MATES = GOLDEN.mixed[:7]
PROMPT = GOLDEN.alone.prompt


@pytest.fixture
def engine() -> Engine:
    return with_scheduler(shared_engine())


def run_alone(params: SamplingParams, prompt: Sequence[int] = PROMPT) -> tuple[int, ...]:
    return generate(with_scheduler(shared_engine()), [prompt], params)[0]


SEEDED = {
    "temperature": sampled(),
    "low temperature": sampled(temperature=0.4),
    "top_k": sampled(top_k=12),
    "top_p": sampled(top_p=0.8),
    "min_p": sampled(min_p=0.05),
    "all of them": sampled(temperature=1.5, top_k=30, top_p=0.9, min_p=0.01),
    "logprobs": sampled(logprobs=2),
}


@pytest.mark.parametrize("name", SEEDED)
def test_a_seed_gives_the_same_tokens_alone_and_among_seven_mates_in_any_order(name: str) -> None:
    params = SEEDED[name]
    alone = run_alone(params)
    assert len(set(alone)) > 3
    mates = [greedy(20), sampled(6), sampled(7, top_k=3), sampled(8, logprobs=1), greedy(40)]
    mates += [sampled(9, min_tokens=3, ignore_eos=False), sampled(None)]
    prompts = [mate.prompt for mate in MATES]
    engine = with_scheduler(shared_engine())
    assert generate(engine, [PROMPT, *prompts], [params, *mates])[0] == alone
    assert generate(engine, [*prompts, PROMPT], [*mates, params])[-1] == alone


@pytest.mark.parametrize("threshold", [1, 7])
def test_a_seed_gives_the_same_tokens_however_its_prompt_is_cut(threshold: int) -> None:
    engine = with_scheduler(shared_engine(), long_prefill_token_threshold=threshold)
    assert generate(engine, [PROMPT], sampled(top_p=0.9)) == [run_alone(sampled(top_p=0.9))]


@pytest.mark.parametrize("max_steps_in_flight", [1, 3])
def test_a_seed_gives_the_same_tokens_with_any_number_of_steps_in_flight(
    max_steps_in_flight: int,
) -> None:
    engine = with_scheduler(shared_engine(), max_steps_in_flight=max_steps_in_flight)
    assert generate(engine, [PROMPT], sampled()) == [run_alone(sampled())]


def test_a_seed_gives_the_same_tokens_after_preemption() -> None:
    params = [sampled(seed, max_tokens=60, top_k=40) for seed in range(8)]
    prompts = [case.prompt for case in GOLDEN.mixed[5:13]]
    engine = with_scheduler(shared_engine(), num_pages=21)
    together = generate(engine, prompts, params)
    assert engine.scheduler.num_preemptions > 0
    assert together == [run_alone(*pair) for pair in zip(params, prompts, strict=True)]


def test_two_seeds_differ_and_so_do_two_positions() -> None:
    outputs = {run_alone(sampled(seed)) for seed in (0, 1, 2**40, 2**63 - 1, -3)}
    assert len(outputs) == 5
    # One likely token over and over would mean that the noise does not change.
    assert all(len(set(output)) > 8 for output in outputs)


def test_requests_without_a_seed_differ_but_an_engine_repeats_itself() -> None:
    def run(seed: int) -> list[tuple[int, ...]]:
        engine = with_scheduler(shared_engine(), seed=seed)
        return generate(engine, [PROMPT, PROMPT], sampled(None))

    first, second = run(0)
    assert first != second
    assert run(0) == [first, second]
    assert run(1) != [first, second]


def test_three_samples_of_a_seed_are_those_of_three_seeds_alone(engine: Engine) -> None:
    add_request(engine, "r", PROMPT, sampled(11, n=3))
    updates = drain(engine)
    assert [tokens_of(updates["r", index]) for index in range(3)] == [
        run_alone(sampled(11 + index)) for index in range(3)
    ]


def test_greedy_rows_among_sampling_rows_keep_the_golden_tokens(engine: Engine) -> None:
    sampling = [sampled(1), sampled(2, top_k=5), sampled(3, top_p=0.5), sampled(4, min_p=0.2)]
    params = [p for s in sampling for p in (greedy(), s)]
    prompts = [case.prompt for case in GOLDEN.mixed[4:12]]
    outputs = generate(engine, prompts, params)
    assert outputs[::2] == [case.tokens for case in GOLDEN.mixed[4:12:2]]
    assert outputs[1::2] != [case.tokens[:24] for case in GOLDEN.mixed[5:12:2]]


def test_top_k_of_one_and_a_tiny_top_p_are_greedy() -> None:
    for params in (sampled(top_k=1), sampled(top_p=1e-6), sampled(min_p=1.0)):
        assert run_alone(params) == GOLDEN.alone.tokens[:24]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def test_log_probabilities_are_those_of_the_golden_logits(engine: Engine) -> None:
    cases = [
        (case.prompt[: position + 1], log_softmax(case.logits[position]))
        for case in GOLDEN.logits
        for position in range(0, len(case.prompt), 3)
    ]
    for index, (prompt, _) in enumerate(cases):
        params = greedy(1, logprobs=20) if index % 2 else sampled(index, max_tokens=1, logprobs=5)
        add_request(engine, str(index), prompt, params)
    updates = drain(engine)
    ranks = set()
    for index, (_, expected) in enumerate(cases):
        (update,) = updates[str(index), 0]
        (token,), logprobs = update.new_token_ids, update.logprobs
        assert logprobs is not None and len(logprobs) == 1
        (entry,) = logprobs
        assert entry.logprob == pytest.approx(expected[token], abs=1e-4)
        assert entry.rank == 1 + (expected > expected[token]).sum()
        order = np.argsort(-expected)[: 20 if index % 2 else 5]
        assert entry.top_ids == tuple(order.tolist())
        np.testing.assert_allclose(entry.top_logprobs, expected[order], atol=1e-4)
        ranks.add(entry.rank)
    assert len(ranks) > 1


def test_every_token_of_a_row_that_asks_has_log_probabilities_and_no_other(engine: Engine) -> None:
    add_request(engine, "with", PROMPT, greedy(20, logprobs=0))
    add_request(engine, "without", MATES[4].prompt, greedy(20))
    updates = drain(engine)
    entries = [entry for update in updates["with", 0] for entry in update.logprobs or ()]
    assert len(entries) == 20
    assert all(entry.rank == 1 and entry.top_ids == () for entry in entries)
    assert all(update.logprobs is None for update in updates["without", 0])
    assert tokens_of(updates["with", 0]) == GOLDEN.alone.tokens[:20]
