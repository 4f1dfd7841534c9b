"""The engine on a real tiny model: ends, errors, and serving without a compilation."""

import itertools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine import Engine
from jaxserve.errors import RequestTooLongError
from jaxserve.execution.model_runner import ModelRunner, StepHandle
from jaxserve.execution.programs import CompilationCounter
from jaxserve.execution.sample_mode import SampleMode
from jaxserve.request import FinishReason
from jaxserve.sampling_params import SamplingParams
from tests.engine_runs import (
    add_request,
    assert_idle_and_sane,
    drain,
    final_of,
    generate,
    greedy,
    sampled,
    shared_engine,
    tokens_of,
    with_empty_cache,
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


POISON = 250


def poisoned_engine(**limits: Any) -> Engine:
    """The shared engine's programs with NaN in the embedding of one token, and an empty cache."""
    engine = with_scheduler(shared_engine(), **limits)
    embedding, *others = engine.runner._leaves
    assert embedding.shape == (256, 64) and embedding is not engine.runner._head
    return with_empty_cache(engine, [embedding.at[POISON].set(jnp.nan), *others])


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

    def __getattr__(self, name):
        return getattr(self._runner, name)

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


def random_params(rng: np.random.Generator, mode: SampleMode) -> SamplingParams:
    """Parameters that need this mode or one before it."""
    fields: dict[str, Any] = {"temperature": 0.0}
    if mode >= SampleMode.SAMPLED:
        fields = {"temperature": float(rng.choice([0.0, 0.7, 1.0]))}
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
            engine.abort(f"{SampleMode(num_steps // 100 % 3).name} 7")
        finals |= {u.request_id: u.finish_reason for u in engine.step() if u.finish_reason}
        handles = [handle for _, handle in engine._in_flight]
        modes |= {h.batch.mode for h in handles if isinstance(h, StepHandle)}
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
