"""AsyncLLMEngine with a real engine process of a tiny model: streams, aborts, deaths."""

import asyncio
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import psutil
import pytest

from jaxserve.async_llm_engine import AsyncLLMEngine, EngineState
from jaxserve.config import EngineConfig
from jaxserve.errors import (
    EngineDeadError,
    EngineNotReadyError,
    InvalidRequestError,
    RequestTooLongError,
)
from jaxserve.llm import LLM
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from tests.tiny_llm import MODEL, SETTINGS, to_text, write_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


class Loop:
    """An event loop in a thread of its own, so that one engine serves many tests."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run[T](self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(200)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> EngineConfig:
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return EngineConfig(model=MODEL, tokenizer=str(tokenizer), **SETTINGS)


async def started(config: EngineConfig) -> AsyncLLMEngine:
    engine = AsyncLLMEngine(config)
    await engine.start()
    await engine.wait_until_ready()
    return engine


@pytest.fixture(scope="module")
def engine(loop: Loop, config: EngineConfig) -> Iterator[AsyncLLMEngine]:
    engine = loop.run(started(config))
    yield engine
    loop.run(engine.close())


@pytest.fixture(scope="module")
def llm(config: EngineConfig) -> LLM:
    return LLM.from_config(config)


def prompt(seed: int, length: int = 9) -> list[int]:
    return [(seed * 31 + 7 * i) % 200 + 10 for i in range(length)]


async def collect(engine: AsyncLLMEngine, prompt, params=GREEDY, *, is_stream: bool = True):
    (submission,) = await engine.prepare_prompts(prompt, params, is_stream=is_stream)
    return [output async for output in engine.stream(submission)]


async def until(condition: Callable[[], bool], seconds: float = 60) -> float:
    """Wait for a condition; how long it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds
        await asyncio.sleep(0.002)
    return time.monotonic() - start


def is_idle(engine: AsyncLLMEngine) -> bool:
    stats = engine.stats
    return (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)


def test_deltas_join_to_the_offline_tokens_and_text(loop, engine, llm):
    outputs = loop.run(collect(engine, prompt(1)))
    (offline,) = llm.generate(prompt(1), GREEDY, use_tqdm=False)
    assert [t for o in outputs for t in o.outputs[0].token_ids] == offline.outputs[0].token_ids
    assert "".join(o.outputs[0].text for o in outputs) == offline.outputs[0].text
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]


def test_32_requests_at_once_give_the_offline_tokens(loop, engine, llm):
    async def all_at_once():
        return await asyncio.gather(
            *(collect(engine, prompt(i, 3 + i), is_stream=False) for i in range(32))
        )

    outputs = loop.run(all_at_once())
    offline = llm.generate([prompt(i, 3 + i) for i in range(32)], GREEDY, use_tqdm=False)
    for (online,), expected in zip(outputs, offline, strict=True):
        assert online.outputs[0].token_ids == expected.outputs[0].token_ids


def test_generate_is_vllms_and_cumulative_unless_told_otherwise(loop, engine):
    async def run(params):
        return [o async for o in engine.generate({"prompt": to_text(prompt(2))}, params, "mine")]

    cumulative = loop.run(run(GREEDY))
    assert {o.request_id for o in cumulative} == {"mine"}
    lengths = [len(o.outputs[0].token_ids) for o in cumulative]
    assert lengths == sorted(lengths) and lengths[-1] == 24
    final = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    (only,) = loop.run(run(final))
    assert only.outputs[0].token_ids == cumulative[-1].outputs[0].token_ids


def test_n_choices_end_as_separate_sequences(loop, engine):
    params = SamplingParams(n=3, temperature=1, seed=4, max_tokens=8, ignore_eos=True)
    (output,) = loop.run(collect(engine, prompt(3), params, is_stream=False))
    assert [o.index for o in output.outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in output.outputs}) > 1


def test_a_stop_string_ends_the_sequence_in_the_engine_too(loop, engine):
    (whole,) = loop.run(collect(engine, prompt(5), is_stream=False))
    words = whole.outputs[0].text.split()
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, stop=[words[6]])
    (stopped,) = loop.run(collect(engine, prompt(5), params, is_stream=False))
    assert stopped.outputs[0].stop_reason == words[6]
    assert stopped.outputs[0].finish_reason == "stop"
    loop.run(until(lambda: is_idle(engine)))


def test_a_client_that_leaves_frees_its_pages_soon(loop, engine):
    async def leave_early() -> float:
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        (submission,) = await engine.prepare_prompts(prompt(6), params)
        stream = engine.stream(submission)
        first = await anext(stream)
        assert not first.finished and engine.num_unfinished_requests == 1
        await stream.aclose()
        assert engine.num_unfinished_requests == 0
        return await until(lambda: is_idle(engine))

    seconds = loop.run(leave_early())
    assert seconds < 1  # 100 ms on a machine that does nothing else; see docs/performance.md


def test_aborting_from_outside_ends_the_stream_with_its_reason(loop, engine):
    async def run():
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        (submission,) = await engine.prepare_prompts(prompt(7), params)
        outputs = []
        async for output in engine.stream(submission):
            outputs.append(output)
            await engine.abort(output.request_id)
        return outputs

    assert loop.run(run())[-1].outputs[0].finish_reason == "abort"


@pytest.mark.parametrize(
    ("bad", "params", "message"),
    [
        ([-1], GREEDY, "prompt_token_ids"),
        ([256], GREEDY, "prompt_token_ids"),
        ([[]], GREEDY, "prompt"),
        ("", GREEDY, "prompt"),
        (7, GREEDY, "prompt"),
        ([1] * 128, GREEDY, "maximum context length"),
        ([1], SamplingParams(max_tokens=128), "max_tokens"),
    ],
)
def test_a_bad_prompt_is_refused_at_the_door_and_the_next_is_served(
    loop, engine, bad, params, message
):
    with pytest.raises(InvalidRequestError, match=message):
        loop.run(collect(engine, bad, params))
    assert loop.run(collect(engine, prompt(1)))[-1].finished


def test_what_can_never_fit_the_pages_is_refused_at_the_door(loop, engine, monkeypatch):
    monkeypatch.setattr(engine, "_max_tokens_per_sequence", 64)
    with pytest.raises(RequestTooLongError, match="KV cache of 64 tokens; got 50 [+] 24"):
        loop.run(collect(engine, prompt(1, 50), GREEDY))
    assert loop.run(collect(engine, prompt(1, 40), GREEDY))[-1].finished


def test_observers_hear_of_everything_and_cannot_hurt(loop, engine):
    heard = []

    class Observer:
        def added(self, request):
            heard.append("added")

        def stepped(self, stats):
            heard.append("stepped")

        def gave(self, request, output):
            heard.append("finished" if output.finished else "gave")

        def aborted(self, request):
            raise RuntimeError("of the observer")

    async def run():
        engine.observers.append(Observer())
        await collect(engine, prompt(8))
        (submission,) = await engine.prepare_prompts(prompt(8), GREEDY)
        stream = engine.stream(submission)
        await anext(stream)
        await stream.aclose()
        engine.observers.clear()

    loop.run(run())
    assert {"added", "stepped", "gave", "finished"} == set(heard)
    assert loop.run(collect(engine, prompt(1)))[-1].finished


def test_before_the_start_nothing_is_taken(loop, config):
    async def run():
        with pytest.raises(EngineNotReadyError):
            await collect(AsyncLLMEngine(config), prompt(1))

    loop.run(run())


def test_settings_that_do_not_fit_the_device_are_told_by_the_one_who_waits(loop, config):
    async def run():
        engine = AsyncLLMEngine(dataclasses.replace(config, tensor_parallel_size=64))
        await engine.start()
        with pytest.raises(EngineDeadError, match="tensor_parallel_size"):
            await engine.wait_until_ready()
        await engine.close()
        assert not psutil.pid_exists(engine.process_id)

    loop.run(run())


def test_a_killed_engine_is_told_to_all_who_wait(loop, config):
    async def run():
        engine = await started(config)
        params = SamplingParams(temperature=1, max_tokens=100, ignore_eos=True)

        async def stream_one(seed: int):
            with pytest.raises(EngineDeadError, match="signal 9"):
                await collect(engine, prompt(seed), params)

        streams = [asyncio.create_task(stream_one(i)) for i in range(16)]
        await until(lambda: engine.stats.num_running > 0)
        start = time.monotonic()
        os.kill(engine.process_id, signal.SIGKILL)
        await asyncio.gather(*streams)
        assert time.monotonic() - start < 5
        assert engine.state is EngineState.DEAD and engine.num_unfinished_requests == 0
        with pytest.raises(EngineDeadError):
            await collect(engine, prompt(1))
        await engine.close()
        assert not psutil.Process().children()[1:]  # only the module's own engine is left

    loop.run(run())


def test_a_stopped_engine_brings_no_news_until_it_goes_on(loop, engine):
    async def run():
        running = asyncio.create_task(collect(engine, prompt(9), GREEDY))
        await until(lambda: engine.num_unfinished_requests == 1)
        os.kill(engine.process_id, signal.SIGSTOP)
        try:
            await until(lambda: engine.seconds_since_news > 0.2)
        finally:
            os.kill(engine.process_id, signal.SIGCONT)
        assert (await running)[-1].finished
        assert engine.seconds_since_news == 0.0

    loop.run(run())
