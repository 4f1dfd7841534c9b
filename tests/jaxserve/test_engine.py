"""The engine on a real tiny model: sampling, ends, aborts, errors; compiled once for all tests."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine import Engine
from jaxserve.errors import RequestTooLongError
from jaxserve.execution.model_runner import ModelRunner
from jaxserve.execution.programs import CompilationCounter
from jaxserve.execution.sample_mode import SampleMode
from jaxserve.request import FinishReason
from jaxserve.sampling_params import SamplingParams
from jaxserve.step import SequenceUpdate
from tests.engine_runs import (
    add_request,
    drain,
    generate,
    greedy,
    shared_engine,
    tokens_of,
    with_scheduler,
)
from tests.goldens_loader import load_golden

GOLDEN = load_golden("llama_gqa")
MATES = GOLDEN.mixed[:7]
PROMPT = GOLDEN.alone.prompt
EOS = 2


@pytest.fixture
def engine() -> Engine:
    return with_scheduler(shared_engine())


def sampled(seed: int | None = 5, **fields: Any) -> SamplingParams:
    defaults = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True, "seed": seed}
    return SamplingParams(**(defaults | fields))


def run_alone(params: SamplingParams, prompt: Sequence[int] = PROMPT) -> tuple[int, ...]:
    return generate(with_scheduler(shared_engine()), [prompt], params)[0]


# Sampling


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


# Log-probabilities


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


# Ends


def final_of(updates: list[SequenceUpdate]) -> SequenceUpdate:
    finals = [update for update in updates if update.finish_reason is not None]
    assert finals == updates[-1:]
    return finals[0]


def test_a_stop_id_ends_a_row_and_the_others_go_on(engine: Engine) -> None:
    case = GOLDEN.mixed[9]
    index = next(i for i in range(5, 60) if case.tokens[i] not in case.tokens[:i])
    stop = case.tokens[index]
    params = SamplingParams(temperature=0, max_tokens=64, stop_token_ids=[stop])
    add_request(engine, "stops", case.prompt, params)
    add_request(engine, "goes on", case.prompt, greedy())
    updates = drain(engine)
    assert tokens_of(updates["stops", 0]) == case.tokens[: index + 1]
    final = final_of(updates["stops", 0])
    assert (final.finish_reason, final.stop_reason) == (FinishReason.STOP, stop)
    assert tokens_of(updates["goes on", 0]) == case.tokens
    assert final_of(updates["goes on", 0]).finish_reason is FinishReason.LENGTH


def test_an_end_of_sequence_id_ends_a_row_unless_it_is_ignored(engine: Engine) -> None:
    case = GOLDEN.mixed[9]
    eos = (case.tokens[3],)
    first = case.tokens.index(eos[0])
    add_request(
        engine, "eos", case.prompt, SamplingParams(temperature=0, max_tokens=9), eos_token_ids=eos
    )
    add_request(engine, "ignored", case.prompt, greedy(9), eos_token_ids=eos)
    updates = drain(engine)
    assert tokens_of(updates["eos", 0]) == case.tokens[: first + 1]
    final = final_of(updates["eos", 0])
    assert (final.finish_reason, final.stop_reason) == (FinishReason.STOP, None)
    assert tokens_of(updates["ignored", 0]) == case.tokens[:9]


def test_min_tokens_forbids_end_tokens_until_there_are_enough(engine: Engine) -> None:
    case = GOLDEN.mixed[9]
    ends = list(dict.fromkeys(case.tokens[:6]))
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "stop_token_ids": ends[1:]}
    add_request(
        engine, "r", case.prompt, SamplingParams(min_tokens=10, **params), eos_token_ids=(ends[0],)
    )
    add_request(engine, "now", case.prompt, SamplingParams(**params), eos_token_ids=(ends[0],))
    updates = drain(engine)
    tokens = tokens_of(updates["r", 0])
    assert len(tokens) >= 10 and not set(tokens[:10]) & set(ends)
    assert tokens_of(updates["now", 0]) == case.tokens[:1]


def test_a_request_that_can_never_fit_is_refused(engine: Engine) -> None:
    with pytest.raises(RequestTooLongError):
        add_request(engine, "r", [5] * 256, greedy(1))
    assert not engine.has_unfinished


# Aborts


def assert_idle_and_sane(engine: Engine) -> None:
    """Nothing is held any more, and the next requests get the golden tokens."""
    engine.scheduler.check_invariants()
    assert not engine.has_unfinished and engine.scheduler.kv_cache_usage == 0
    roster = engine.scheduler._roster
    assert all(pool.num_free == pool.num_usable for pool in roster.page_pools)
    assert roster.slot_pool.num_free == roster.slot_pool.max_num_seqs
    outputs = generate(engine, [case.prompt for case in MATES], greedy())
    assert outputs == [case.tokens for case in MATES]


def step_until(engine: Engine, condition: Callable[[], bool]) -> list[SequenceUpdate]:
    """Step until the engine is in a state; the updates on the way."""
    updates: list[SequenceUpdate] = []
    for _ in range(400):
        if condition():
            return updates
        updates += engine.step()
        engine.scheduler.check_invariants()
    raise AssertionError("the state was never reached")


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
        assert tokens == run_alone(sampled(11 + index))
    assert_idle_and_sane(engine)


# Errors


POISON = 250


def poisoned_engine(**limits: Any) -> Engine:
    """The shared engine's programs with NaN in the embedding of one token, and an empty cache."""
    engine = with_scheduler(shared_engine(), **limits)
    runner = engine.runner
    leaves = list(runner._leaves)
    assert leaves[0].shape == (256, 64) and leaves[0] is not runner._head
    leaves[0] = leaves[0].at[POISON].set(jnp.nan)
    cache = jax.tree.map(jnp.zeros_like, runner._cache)
    state = jax.tree.map(jnp.zeros_like, runner._state)
    engine.runner = ModelRunner(leaves, cache, state, runner._programs, head_index=0)
    engine.runner._head = runner._head
    return engine


CLEAN = [case for case in GOLDEN.mixed if POISON not in case.prompt + case.tokens]


def test_a_row_with_nan_ends_with_an_error_and_the_others_are_equal_to_the_bit() -> None:
    assert len(CLEAN) >= 4
    outputs = []
    for has_poison in (False, True):
        engine = poisoned_engine()
        if has_poison:
            add_request(engine, "nan", [9, 8, POISON, 7], greedy(20, logprobs=3))
        for index, case in enumerate(CLEAN[:4]):
            add_request(engine, str(index), case.prompt, greedy(30, logprobs=5))
        outputs.append(drain(engine))
    quiet, loud = outputs
    (final,) = loud.pop(("nan", 0))
    assert final.finish_reason is FinishReason.ERROR
    assert final.error == "logits must be finite; got NaN, or no finite value"
    assert final.new_token_ids == ()
    for key, updates in quiet.items():
        assert tokens_of(loud[key]) == tokens_of(updates)
        assert [u.logprobs for u in loud[key]] == [u.logprobs for u in updates]
    assert [tokens_of(quiet[str(i), 0]) for i in range(4)] == [c.tokens[:30] for c in CLEAN[:4]]


def test_pages_that_hold_nan_harm_no_later_owner() -> None:
    engine = poisoned_engine(num_pages=17)
    add_request(engine, "nan", [POISON] * 100, greedy(20))
    ((final,),) = drain(engine).values()
    assert final.finish_reason is FinishReason.ERROR
    pages = np.asarray(engine.runner._cache.groups[0].v_pages)[:, 1:17]
    assert np.isnan(pages).any()
    outputs = generate(engine, [case.prompt for case in CLEAN[:3]], greedy(40))
    assert outputs == [case.tokens[:40] for case in CLEAN[:3]]


class FailingRunner:
    """Passes everything on to a runner, except that chosen steps raise."""

    def __init__(self, runner: ModelRunner, fails: Callable[[Any], bool], method: str):
        self._runner, self._fails, self._method = runner, fails, method

    def dispatch(self, batch):
        if self._method == "dispatch" and self._fails(batch):
            raise RuntimeError("the device is out of memory at 0xABC")
        return self._runner.dispatch(batch)

    def collect(self, handle):
        if self._method == "collect" and self._fails(handle.batch):
            raise RuntimeError("the device is out of memory at 0xABC")
        return self._runner.collect(handle)


@pytest.mark.parametrize("method", ["dispatch", "collect"])
def test_a_step_that_raises_ends_its_requests_with_an_error_and_no_later_one(
    engine: Engine, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    runner, steps = engine.runner, iter(range(1000))
    engine.runner = cast(ModelRunner, FailingRunner(runner, lambda _: next(steps) == 5, method))
    for index, case in enumerate(MATES[:3]):
        add_request(engine, str(index), case.prompt, greedy())
    updates = drain(engine)
    for index in range(3):
        final = final_of(updates[str(index), 0])
        assert final.finish_reason is FinishReason.ERROR
        assert final.error is not None and "RuntimeError" in final.error
        assert "0xABC" not in final.error
    assert "0xABC" in caplog.text and "'1'" in caplog.text
    assert_idle_and_sane(engine)


# Serving


def random_params(rng: np.random.Generator, mode: SampleMode) -> SamplingParams:
    """Parameters that need this mode or one before it."""
    fields: dict[str, Any] = {"temperature": 0.0}
    if mode >= SampleMode.RANDOM:
        fields = {"temperature": float(rng.choice([0.0, 0.7, 1.0]))}
    if mode >= SampleMode.TRUNCATED:
        fields |= {"top_k": int(rng.choice([0, 20])), "top_p": float(rng.choice([1.0, 0.8]))}
    if mode == SampleMode.FULL:
        fields |= {"logprobs": [None, 0, 20][rng.integers(3)], "min_tokens": rng.integers(3)}
    return sampled(
        int(rng.integers(1000)) if rng.random() < 0.5 else None,
        stop_token_ids=rng.integers(0, 256, rng.integers(0, 9)).tolist(),
        ignore_eos=bool(rng.random() < 0.5),
        max_tokens=int(rng.integers(3, 60)),
        **fields,
    )


def test_serving_compiles_nothing() -> None:
    engine = with_scheduler(shared_engine(), num_pages=40)
    rng = np.random.default_rng(3)
    requests = {
        f"{mode.name} {index}": (random_params(rng, mode), rng.integers(3, 256, length).tolist())
        for mode in SampleMode
        for index, length in enumerate(rng.integers(1, 190, 12))
    }
    finals, modes = {}, set()
    counter = CompilationCounter()
    for name, (params, prompt) in requests.items():
        add_request(engine, name, prompt, params, eos_token_ids=(EOS,))
    for num_steps in itertools.count():
        if not engine.has_unfinished:
            break
        if num_steps % 100 == 0:
            engine.abort(f"{SampleMode(num_steps // 100 % 4).name} 7")
        finals |= {u.request_id: u.finish_reason for u in engine.step() if u.finish_reason}
        modes |= {handle.batch.mode for _, handle in engine._in_flight}
    assert counter.count == 0
    assert finals.keys() == requests.keys()
    assert set(finals.values()) == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}
    assert engine.scheduler.num_preemptions > 0 and set(SampleMode) <= modes
    jax.jit(lambda x: x + 41.5)(np.ones(3))
    assert counter.count > 0, "the counter must see a compilation"


def test_times_count_steps_and_tokens(engine: Engine) -> None:
    generate(engine, [PROMPT], greedy(10))
    times = engine.times
    assert times.num_steps == 10
    assert times.num_tokens == len(PROMPT) + 9
    assert times.num_padded_tokens == 64 + 9 * 8
    assert min(times.schedule, times.build, times.dispatch, times.collect, times.commit) > 0


def test_an_idle_engine_steps_to_nothing(engine: Engine) -> None:
    assert not engine.has_unfinished
    assert engine.step() == []
