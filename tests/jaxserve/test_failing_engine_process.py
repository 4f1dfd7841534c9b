"""F13 across two processes: clients are told, the state is dead and the process leaves non-zero."""

import asyncio
import logging
import sys
import time
from collections.abc import Iterator

import pytest

from jaxserve.async_llm_engine import AsyncLLMEngine, EngineState
from jaxserve.config import EngineConfig
from jaxserve.distributed import socket_client
from jaxserve.distributed.messages import EngineFailed, StepNews
from jaxserve.engine_builder import GPU_STEP_SECONDS, _step_timeout
from jaxserve.errors import EngineDeadError
from jaxserve.outputs import RequestOutput
from jaxserve.request import FinishReason
from jaxserve.sampling_params import SamplingParams
from tests.engine_runs import shared_engine, with_empty_cache, with_scheduler
from tests.goldens_loader import load_golden
from tests.jaxserve.faulty_runner import INTERNAL, FaultyRunner, raises
from tests.jaxserve.test_engine_process import Peer, add
from tests.tiny_llm import MODEL, SETTINGS

STEP_TIMEOUT = 2.0
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
PROMPT = {"prompt_token_ids": [5, 6, 7]}


@pytest.mark.parametrize(
    ("given", "is_gpu", "expected"),
    [
        (None, True, GPU_STEP_SECONDS),
        (None, False, None),
        (0, True, None),
        (1.5, False, 1.5),
    ],
)
def test_only_gpus_have_a_limit_of_their_own(given, is_gpu, expected):
    assert _step_timeout(EngineConfig(step_timeout=given), is_gpu=is_gpu) == expected


@pytest.fixture
def failing_process(monkeypatch: pytest.MonkeyPatch, request) -> Iterator[None]:
    """Engine processes fail in the mode of the test's parameter."""

    def command(file_descriptor: int) -> list[str]:
        words = [str(file_descriptor), str(logging.ERROR), request.param]
        return [sys.executable, "-m", "tests.jaxserve.failing_engine_process", *words]

    monkeypatch.setattr(socket_client, "_command", command)
    yield


async def run(engine: AsyncLLMEngine, name: str) -> list[RequestOutput]:
    """The outputs of one request up to its end; an error that ends it is raised."""
    return [output async for output in engine.generate(PROMPT, GREEDY, name)]


def new_engine(**settings) -> AsyncLLMEngine:
    return AsyncLLMEngine(
        EngineConfig(model=MODEL, skip_tokenizer_init=True, **(SETTINGS | settings))
    )


@pytest.mark.parametrize("failing_process", ["hang"], indirect=True)
def test_a_hanging_device_is_seen_and_told_and_the_process_ends(failing_process, capfd):
    async def work() -> None:
        engine = new_engine(step_timeout=STEP_TIMEOUT)
        await engine.start()
        await engine.wait_until_ready()
        start = time.monotonic()
        ends = await asyncio.gather(run(engine, "a"), run(engine, "b"), return_exceptions=True)
        assert STEP_TIMEOUT * 0.9 < time.monotonic() - start < 30
        for end in ends:
            assert isinstance(end, EngineDeadError)
            assert str(end) == f"a step has not come back for {STEP_TIMEOUT:g} s"
        assert engine.state is EngineState.DEAD
        assert engine._client is not None and await engine._client._wait(5) == 1
        with pytest.raises(EngineDeadError, match="not come back"):
            await run(engine, "c")
        await engine.close()

    asyncio.run(work())
    assert "failing_engine_process.py" in capfd.readouterr().err


@pytest.mark.parametrize("failing_process", ["internal"], indirect=True)
def test_a_device_that_keeps_failing_ends_the_process_after_all_are_told(failing_process, capfd):
    async def work() -> None:
        engine = new_engine()
        await engine.start()
        await engine.wait_until_ready()
        start = time.monotonic()
        ends = await asyncio.gather(run(engine, "a"), run(engine, "b"))
        assert time.monotonic() - start < 5
        for outputs in ends:
            assert outputs[-1].outputs[0].finish_reason == "error"
        assert engine.state is EngineState.READY
        (last,) = (await run(engine, "next"))[-1:]
        assert last.outputs[0].finish_reason == "error"
        assert engine._client is not None and await engine._client._wait(5) == 1
        with pytest.raises(EngineDeadError, match="failed twice in a row"):
            await run(engine, "refused")
        assert engine.state is EngineState.DEAD
        await engine.close()

    asyncio.run(work())
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in capfd.readouterr().err


def test_the_last_words_of_a_dead_engine_come_behind_the_ends_of_its_requests():
    engine = with_empty_cache(with_scheduler(shared_engine()))
    FaultyRunner.of(engine, "dispatch", [0, 1], raises(INTERNAL))
    peer = Peer(engine)
    try:
        for name in "ab":
            peer.send(add(name, load_golden("llama_gqa").mixed[4].prompt))
            if name == "a":
                peer.turn()
        with pytest.raises(EngineDeadError, match="twice in a row"):
            peer.loop.turn()
        news, last = peer.receive(), peer.receive()
        assert isinstance(news, StepNews) and isinstance(last, EngineFailed)
        assert [u.finish_reason for u in news.updates] == [FinishReason.ERROR]
        assert last.message == engine.death_reason
        assert peer.connection._writer.is_alive() is False
    finally:
        peer.close()


def test_last_words_to_a_reader_that_reads_nothing_hold_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("jaxserve.distributed.engine_process.LAST_WORDS_SECONDS", 0.2)
    engine = with_scheduler(shared_engine())
    peer = Peer(engine)
    try:
        full = EngineFailed("x" * (1 << 22))
        peer.connection.send(full)  # more than a socket holds
        start = time.monotonic()
        peer.connection.send_last(EngineFailed("y"))
        assert time.monotonic() - start < 5
        assert peer.receive() == full and peer.receive() == EngineFailed("y")
    finally:
        peer.close()
