"""Sleep: what is freed, what comes back, and who is refused meanwhile; on real tiny models."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.async_llm_engine import AsyncLLMEngine
from jaxserve.config import EngineConfig
from jaxserve.distributed.messages import (
    FromEngine,
    MemoryChanged,
    ReleaseCache,
    RequestRefused,
    Sleep,
    StepNews,
    ToEngine,
    WakeUp,
)
from jaxserve.engine import Engine
from jaxserve.errors import EngineNotReadyError, InvalidRequestError, ModelLoadError
from jaxserve.execution.programs import CompilationCounter
from jaxserve.llm import LLM
from jaxserve.outputs import RequestOutput
from jaxserve.request import FinishReason
from jaxserve.sampling_params import SamplingParams
from tests.engine_runs import (
    add_request,
    assert_idle_and_sane,
    drain,
    final_of,
    generate,
    greedy,
    make_engine,
    step_until,
    tokens_of,
)
from tests.goldens_loader import load_golden
from tests.jaxserve.test_engine_process import Peer, add
from tests.tiny_llm import MODEL, SETTINGS

GOLDEN = load_golden("llama_gqa")
CASES = GOLDEN.mixed[:7]
ASLEEP = "the engine must be awake; it sleeps at level {}; wake it up first"
PROMPT = {"prompt_token_ids": [(7 * i) % 200 + 10 for i in range(40)]}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def shared() -> Engine:
    return make_engine(GOLDEN.folder, stacked_weights="all").engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """One engine for many tests, each of which leaves it awake and idle."""
    yield shared
    shared.wake_up()
    assert shared.sleep_level == 0 and not shared.has_unfinished


def arrays_of(engine: Engine) -> tuple[list[jax.Array], list[jax.Array]]:
    """The weights; the cache and the state."""
    runner = engine.runner
    return list(runner.weights), jax.tree.leaves((runner._cache, runner._state))


def live_bytes() -> int:
    """On the device."""
    arrays = [a for a in jax.live_arrays() if a.sharding.memory_kind == "device"]
    return sum(array.nbytes for array in arrays)


def run_cases(engine: Engine) -> None:
    assert generate(engine, [c.prompt for c in CASES], greedy()) == [c.tokens for c in CASES]


def add_cases(engine: Engine) -> None:
    for index, case in enumerate(CASES):
        add_request(engine, str(index), case.prompt, greedy())


@pytest.mark.parametrize("level", [1, 2])
def test_all_bytes_go_and_come_back_the_same_and_nothing_is_compiled(engine: Engine, level: int):
    run_cases(engine)
    weights, cache = arrays_of(engine)
    values = [np.array(leaf) for leaf in weights]
    num_bytes = sum(leaf.nbytes for leaf in (*weights, *cache))
    before, counter = live_bytes(), CompilationCounter()
    engine.sleep(level)
    assert all(leaf.is_deleted() for leaf in (*weights, *cache))
    assert before - live_bytes() == num_bytes > 0
    assert engine.sleep_level == level and not engine.has_unfinished
    with pytest.raises(EngineNotReadyError) as caught:
        add_request(engine, "refused", CASES[0].prompt, greedy())
    assert str(caught.value) == ASLEEP.format(level)
    engine.wake_up()
    back, zeros = arrays_of(engine)
    assert engine.sleep_level == 0 and sum(leaf.nbytes for leaf in (*back, *zeros)) == num_bytes
    for value, leaf, old in zip(values, back, weights, strict=True):
        assert leaf.sharding == old.sharding and leaf.dtype == old.dtype
        np.testing.assert_array_equal(np.asarray(leaf), value)
    assert not any(np.asarray(leaf).any() for leaf in zeros)
    assert_idle_and_sane(engine)
    assert counter.count == 0


def test_no_prefix_outlives_a_sleep(engine: Engine):
    prompt = GOLDEN.mixed[15].prompt
    for num_cached in (0, len(prompt) - 1, 0):
        add_request(engine, "a", prompt, greedy(4))
        assert final_of(drain(engine)["a", 0]).num_cached_tokens == num_cached
        if num_cached:
            engine.sleep()
            engine.wake_up()
    assert num_cached == 0
    engine.sleep()


def test_tags_bring_back_a_part_and_the_engine_sleeps_until_the_last(engine: Engine):
    for first, second in (("weights", "kv_cache"), ("kv_cache", "weights")):
        engine.sleep(2)
        engine.wake_up([first])
        weights, cache = arrays_of(engine)
        assert all(leaf.is_deleted() == (first != "weights") for leaf in weights)
        assert all(leaf.is_deleted() == (first != "kv_cache") for leaf in cache)
        engine.wake_up([first])
        assert engine.sleep_level == 2
        with pytest.raises(EngineNotReadyError):
            add_request(engine, "refused", CASES[0].prompt, greedy())
        engine.wake_up([second])
        assert engine.sleep_level == 0
        run_cases(engine)


def test_a_deeper_sleep_drops_more_and_a_lighter_one_brings_nothing_back(engine: Engine):
    engine.sleep(1)
    engine.sleep(1)
    assert engine.sleep_level == 1
    engine.sleep(2)
    engine.sleep(1)
    assert engine.sleep_level == 2 and engine._sleeper._host_weights is None
    engine.wake_up()
    run_cases(engine)
    engine.sleep(2)
    engine.wake_up(["weights"])
    engine.sleep(1)  # has the weights to keep
    assert engine.sleep_level == 1
    engine.wake_up()
    run_cases(engine)


def test_running_and_waiting_requests_end_once_with_the_tokens_that_they_have(engine: Engine):
    add_cases(engine)
    add_request(engine, "n", CASES[0].prompt, SamplingParams(n=3, max_tokens=40, ignore_eos=True))
    updates = step_until(engine, lambda: engine.times.num_steps % 7 == 6)
    assert engine.scheduler.num_running and engine.scheduler.num_waiting
    engine.sleep()
    while engine.has_unfinished:
        updates += engine.step()
    ends = [u for u in updates if u.finish_reason is not None]
    assert [u.finish_reason for u in ends] == [FinishReason.ABORT] * 10
    assert len({(u.request_id, u.index) for u in ends}) == 10
    for index, case in enumerate(CASES):
        tokens = tokens_of([u for u in updates if u.request_id == str(index)])
        assert tokens == case.tokens[: len(tokens)]
    engine.wake_up()
    assert_idle_and_sane(engine)


@pytest.mark.parametrize("level", [1, 2])
def test_kept_requests_are_frozen_and_go_on_with_their_next_token(engine: Engine, level: int):
    add_cases(engine)
    updates = step_until(engine, lambda: engine.times.num_steps % 7 == 6)
    engine.sleep(level, keeps_requests=True)
    while engine.has_unfinished:
        updates += engine.step()
    with pytest.raises(EngineNotReadyError):
        engine.step()
    num_tokens = len(updates)
    engine.abort("3")
    assert [u.request_id for u in engine.step()] == ["3"]
    engine.wake_up(["kv_cache"])
    assert not engine.has_unfinished
    engine.wake_up(["weights"])
    for rest in drain(engine).values():
        updates += rest
    assert num_tokens < len(updates)
    for index, case in enumerate(CASES):
        own = [u for u in updates if u.request_id == str(index)]
        if index != 3:
            assert tokens_of(own) == case.tokens
            assert final_of(own).finish_reason is FinishReason.LENGTH
    assert_idle_and_sane(engine)


def test_the_caches_memory_alone_is_released_and_the_next_request_takes_it(engine: Engine):
    run_cases(engine)
    counter = CompilationCounter()
    for _ in range(2):
        engine.release_cache()
        weights, cache = arrays_of(engine)
        assert all(leaf.is_deleted() for leaf in cache)
        assert not any(leaf.is_deleted() for leaf in weights) and engine.sleep_level == 0
    add_request(engine, "a", CASES[0].prompt, greedy())
    with pytest.raises(InvalidRequestError, match="while no request is unfinished; got 1"):
        engine.release_cache()
    updates = drain(engine)["a", 0]
    assert tokens_of(updates) == CASES[0].tokens and final_of(updates).num_cached_tokens == 0
    engine.release_cache()
    engine.wake_up()
    assert not any(leaf.is_deleted() for leaf in arrays_of(engine)[1])
    engine.release_cache()
    engine.sleep()
    engine.wake_up()
    assert_idle_and_sane(engine)
    assert counter.count == 0


def test_memory_that_is_not_there_is_told_and_the_next_try_succeeds(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    def no_memory(*arguments: Any, **keywords: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nand a trace")

    got = "; got RESOURCE_EXHAUSTED: Out of memory$"
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", no_memory)
        with pytest.raises(EngineNotReadyError, match="go to the host's memory" + got):
            engine.sleep(1)
    assert engine.sleep_level == 0
    run_cases(engine)
    engine.sleep(1)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", no_memory)
        with pytest.raises(EngineNotReadyError, match="weights must come back to the device" + got):
            engine.wake_up()
        engine.wake_up(["kv_cache"])
    assert engine.sleep_level == 1
    engine.wake_up()
    engine.release_cache()
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "_allocate", no_memory)
        with pytest.raises(EngineNotReadyError, match="cache must come back to the device" + got):
            add_request(engine, "refused", CASES[0].prompt, greedy())
        assert not engine.has_unfinished
    assert_idle_and_sane(engine)


def test_level_2_reads_the_files_as_they_are_at_the_wake_up(tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN.folder, folder)
    engine = make_engine(folder).engine
    run_cases(engine)
    engine.sleep(2)
    (folder / "model.safetensors").rename(tmp_path / "kept")
    with pytest.raises(ModelLoadError):
        engine.wake_up()
    assert engine.sleep_level == 2
    tensors = load_file(tmp_path / "kept")
    tensors["model.norm.weight"] = -tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    engine.wake_up()
    prompts = [case.prompt for case in CASES]
    other = generate(engine, prompts, greedy())
    assert other != [case.tokens for case in CASES]
    assert other == generate(make_engine(folder).engine, prompts, greedy())


def test_the_host_tier_and_poisoned_pages_go_with_a_sleep():
    engine = make_engine(
        GOLDEN.folder,
        num_gpu_blocks_override=24,
        kv_offloading_size=2**-8,
        preemption_mode="swap",
        debug_poison_pages=True,
    ).engine
    mover = engine.runner.page_mover
    assert mover is not None
    prompts = [case.prompt for case in GOLDEN.mixed]
    expected = [case.tokens[:64] for case in GOLDEN.mixed]
    for level in (1, 2):
        offloaded = mover.num_offloaded_bytes
        assert generate(engine, prompts, greedy()) == expected
        assert mover.num_offloaded_bytes > offloaded
        num_hits = engine.scheduler.num_prefix_hits
        engine.sleep(level)
        assert not mover._pending and not any(map(any, mover._host_pages._pages))
        engine.wake_up()
        add_request(engine, "first", prompts[15], greedy(8))
        assert tokens_of(drain(engine)["first", 0]) == expected[15][:8]
        assert engine.scheduler.num_prefix_hits == num_hits
    add_cases(engine)
    step_until(engine, lambda: engine.times.num_steps % 7 == 6)
    engine.sleep(keeps_requests=True)
    engine.wake_up()
    assert all(u[-1].finish_reason is FinishReason.LENGTH for u in drain(engine).values())
    assert_idle_and_sane(engine)


@pytest.fixture
def peer(engine: Engine) -> Iterator[Peer]:
    peer = Peer(engine)
    yield peer
    peer.close()


def test_ends_are_told_before_the_answer_and_commands_wait_for_one_that_waits(peer: Peer):
    peer.send(add("a", CASES[0].prompt, 20), add("b", CASES[1].prompt, 30))
    peer.turn()
    peer.send(Sleep(2, "wait"), WakeUp(("weights", "kv_cache")), Sleep(1, "abort"))
    peer.turn()
    assert not any(isinstance(news, MemoryChanged) for news in peer.news)
    while not isinstance(peer.news[-1], MemoryChanged):
        peer.loop.turn()
        peer.receive()
    levels = [peer.news[-1].stats.sleep_level]
    for _ in range(2):
        news = peer.receive()
        assert isinstance(news, MemoryChanged) and news.error is None
        levels.append(news.stats.sleep_level)
    assert levels == [2, 0, 1]
    assert peer.tokens_of("a") == list(CASES[0].tokens[:20])
    assert peer.tokens_of("b") == list(CASES[1].tokens[:30])
    peer.send(WakeUp(("weights", "kv_cache")))
    peer.loop.turn()
    assert peer.receive() == peer.news[-1]
    peer.send(add("c", CASES[2].prompt, 20))
    peer.turn()
    peer.send(Sleep(1, "abort"))
    peer.loop.turn()
    ends = peer.receive()
    assert isinstance(ends, StepNews)
    assert ends.updates[-1].finish_reason is FinishReason.ABORT
    assert isinstance(peer.receive(), MemoryChanged)


def test_the_process_tells_what_it_cannot_do_and_goes_on(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
):
    runner = peer.engine.runner

    def fail(error: Exception) -> Any:
        raise error

    def told(message: ToEngine) -> FromEngine:
        peer.send(message)
        peer.loop.turn()
        return peer.receive()

    assert told(ReleaseCache()) == MemoryChanged(peer.loop._stats())
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_allocate", lambda: fail(MemoryError()))
        news = told(add("a", CASES[0].prompt, 20))
    assert isinstance(news, RequestRefused) and news.is_not_ready
    assert news.message == "the KV cache must come back to the device; got MemoryError"
    peer.send(add("a", CASES[0].prompt, 20))
    peer.turn()
    peer.send(ReleaseCache())
    peer.loop.turn()
    refused = peer.receive()
    assert isinstance(refused, MemoryChanged) and refused.is_refusal
    assert isinstance(peer.receive(), StepNews)
    peer.turn_until_idle()
    assert peer.tokens_of("a") == list(CASES[0].tokens[:20])
    assert isinstance(told(Sleep(2, "abort")), MemoryChanged)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_load_weights", lambda: fail(ModelLoadError("/secret/path")))
        news = told(WakeUp(("weights",)))
    assert isinstance(news, MemoryChanged) and news.stats.sleep_level == 2
    assert news.error == "the weights could not be loaded again; see the server's log"


@pytest.fixture(scope="module")
def llm() -> LLM:
    switches: dict[str, Any] = {"skip_tokenizer_init": True, "disable_log_stats": False}
    return LLM(MODEL, enable_sleep_mode=True, **switches, **SETTINGS)


def ask(llm: LLM) -> list[int]:
    (output,) = llm.generate(PROMPT, PARAMS, use_tqdm=False)
    return output.outputs[0].token_ids


def sleep_states(llm: LLM) -> dict[str, float]:
    name = "vllm:engine_sleep_state"
    gauges: list[Any] = [metric for metric in llm.get_metrics() if metric.name == name]
    return {gauge.labels["sleep_state"]: gauge.value for gauge in gauges}


@pytest.mark.parametrize(
    ("level", "state"), [(1, "weights_offloaded"), (2, "discard_all")], ids=["1", "2"]
)
def test_llm_gives_the_same_tokens_after_a_sleep_and_shows_it(llm: LLM, level: int, state: str):
    tokens = ask(llm)
    assert ask(llm) == tokens
    llm.sleep(level)
    assert sleep_states(llm) == {
        name: name == state for name in ("awake", "weights_offloaded", "discard_all")
    }
    with pytest.raises(EngineNotReadyError) as caught:
        ask(llm)
    assert str(caught.value) == ASLEEP.format(level)
    llm.wake_up(tags=["weights"])
    assert sleep_states(llm)[state] == 1
    llm.wake_up(tags=["kv_cache"])
    assert sleep_states(llm)["awake"] == 1
    assert ask(llm) == tokens
    llm.release_kv_cache_memory()
    assert sleep_states(llm)["awake"] == 1
    assert ask(llm) == tokens


def rest_of(stream: Iterator[RequestOutput]) -> tuple[list[int], str | None]:
    outputs = list(stream)
    tokens = [token for output in outputs for token in output.outputs[0].token_ids]
    assert outputs[-1].finished and not any(output.finished for output in outputs[:-1])
    return tokens, outputs[-1].outputs[0].finish_reason


def test_an_open_stream_ends_runs_on_or_is_frozen_as_the_mode_says(llm: LLM):
    tokens = ask(llm)
    for mode in ("abort", "wait", "keep"):
        stream = llm.stream(PROMPT, PARAMS)
        told = [token for _ in range(3) for token in next(stream).outputs[0].token_ids]
        llm.sleep(mode=mode)
        if mode == "keep":
            llm.wake_up()
        rest, reason = rest_of(stream)
        told += rest
        assert told == tokens[: len(told)]
        assert (len(told) == len(tokens)) == (mode != "abort")
        assert reason == ("abort" if mode == "abort" else "length")
        llm.wake_up()
        assert not llm.engine.has_unfinished and ask(llm) == tokens
    stream = llm.stream(PROMPT, PARAMS)
    next(stream)
    with pytest.raises(InvalidRequestError, match="release_kv_cache_memory"):
        llm.release_kv_cache_memory()
    llm.sleep(mode="keep")
    with pytest.raises(EngineNotReadyError):
        list(stream)
    llm.wake_up()
    assert not llm.engine.has_unfinished and ask(llm) == tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": 0}, "level must be 1 or 2 in this release; got 0"),
        ({"level": 3}, "level must be 1 or 2 in this release; got 3"),
        ({"level": True}, "level must be an integer; got True"),
        ({"mode": "drain"}, "mode must be one of abort, wait, keep; got 'drain'"),
        ({"mode": None}, "mode must be one of abort, wait, keep; got None"),
    ],
)
def test_what_is_not_built_is_refused_by_name(llm: LLM, arguments: dict, message: str):
    with pytest.raises(InvalidRequestError) as caught:
        llm.sleep(**arguments)
    assert str(caught.value) == message
    ask(llm)


@pytest.mark.parametrize("tags", [[], "weights", ["scheduling"], ["weights", 7], [[]]])
def test_a_tag_that_is_none_is_refused(llm: LLM, tags: Any):
    with pytest.raises(InvalidRequestError, match="tags must be a list of weights and kv_cache"):
        llm.wake_up(tags)


def test_an_engine_process_sleeps_in_each_mode_and_refuses_meanwhile():
    async def collect(engine: AsyncLLMEngine, first: asyncio.Event) -> tuple[list[int], Any]:
        outputs = []
        async for output in engine.generate(PROMPT, PARAMS):
            outputs.append(output.outputs[0])
            first.set()
        return outputs[-1].token_ids, outputs[-1].finish_reason

    async def main() -> None:
        engine = AsyncLLMEngine(EngineConfig(model=MODEL, skip_tokenizer_init=True, **SETTINGS))
        with pytest.raises(EngineNotReadyError, match=r"await its start\(\)"):
            await engine.sleep()
        try:
            await engine.start()
            with pytest.raises(EngineNotReadyError, match="still starting"):
                await engine.sleep()
            await engine.wait_until_ready()
            tokens, _ = await collect(engine, asyncio.Event())
            for level, mode in ((1, "abort"), (2, "wait"), (1, "keep"), (2, "keep")):
                first = asyncio.Event()
                running = asyncio.create_task(collect(engine, first))
                await first.wait()
                sleeping = asyncio.create_task(engine.sleep(level, mode))
                await asyncio.sleep(0)
                assert await engine.is_sleeping()
                with pytest.raises(EngineNotReadyError, match="must be awake"):
                    await collect(engine, asyncio.Event())
                await sleeping
                assert running.done() == (mode != "keep")
                assert engine.stats.sleep_level == level and engine.seconds_since_news == 0
                with pytest.raises(EngineNotReadyError, match="must be awake"):
                    await collect(engine, asyncio.Event())
                await engine.wake_up(["weights"])
                assert await engine.is_sleeping()
                await engine.wake_up()
                assert not await engine.is_sleeping()
                told, reason = await running
                assert reason == ("abort" if mode == "abort" else "length")
                assert told == tokens[: len(told)] and (mode == "abort" or told == tokens)
            await engine.release_kv_cache_memory()
            assert not await engine.is_sleeping()
            first = asyncio.Event()
            running = asyncio.create_task(collect(engine, first))
            await first.wait()
            with pytest.raises(InvalidRequestError, match="while no request is unfinished"):
                await engine.release_kv_cache_memory()
            assert (await running)[0] == tokens
            assert engine.stats.num_compilations == 0
        finally:
            await engine.close()

    asyncio.run(main())
