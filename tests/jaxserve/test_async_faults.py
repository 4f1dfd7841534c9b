"""AsyncLLMEngine when things go wrong or come in an odd order; the process is a script."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from jaxserve.async_llm_engine import AsyncLLMEngine, EngineState
from jaxserve.config import EngineConfig
from jaxserve.distributed.messages import (
    AbortRequest,
    AddRequest,
    BadFrameError,
    EngineReady,
    EngineStats,
    FromEngine,
    RequestRefused,
    StartRefused,
    StepNews,
    ToEngine,
)
from jaxserve.distributed.socket_client import SocketClient
from jaxserve.errors import EngineDeadError, InvalidRequestError
from jaxserve.request import FinishReason
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.step import SequenceUpdate
from tests.engine_infos import make_info
from tests.tiny_llm import MODEL

INFO = make_info()


class ScriptedClient:
    """The socket's end of a process that says what the test says."""

    process_id = 0

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []
        self.news: asyncio.Queue[FromEngine | EngineDeadError] = asyncio.Queue()
        self.refuses_frames = self.is_killed = False
        self.num_closed = 0

    @property
    def added(self) -> list[str]:
        return [m.request_id for m in self.sent if isinstance(m, AddRequest)]

    @property
    def aborted(self) -> list[str]:
        return [m.request_id for m in self.sent if isinstance(m, AbortRequest)]

    def send(self, message: ToEngine) -> None:
        if self.refuses_frames and isinstance(message, AddRequest):
            raise BadFrameError("frames must have at most 9 bytes; got 10")
        self.sent.append(message)

    async def receive(self) -> FromEngine:
        message = await self.news.get()
        if isinstance(message, EngineDeadError):
            raise message
        return message

    async def close(self, *, at_once: bool = False) -> None:
        self.num_closed += 1

    def kill(self) -> None:
        self.is_killed = True
        self.news.put_nowait(EngineDeadError("the engine process has ended by signal 9"))

    async def tell(self, *messages: FromEngine | EngineDeadError) -> None:
        """Say it, and let the engine hear it."""
        for message in messages:
            self.news.put_nowait(message)
        for _ in range(5):
            await asyncio.sleep(0)

    async def step(self, engine_id: str, *tokens: int, is_last: bool = False) -> None:
        update = SequenceUpdate(
            request_id=engine_id,
            index=0,
            new_token_ids=tokens,
            finish_reason=FinishReason.LENGTH if is_last else None,
        )
        await self.tell(StepNews([update], EngineStats()))


class Started:
    """An engine whose process is scripted, started and ready."""

    def __init__(self, monkeypatch) -> None:
        self.client = ScriptedClient()

        async def give_client(config: EngineConfig) -> ScriptedClient:
            return self.client

        monkeypatch.setattr(SocketClient, "start", give_client)
        self.engine = new_engine()

    async def start(self) -> None:
        await self.engine.start()
        await self.client.tell(EngineReady(INFO))
        await self.engine.wait_until_ready()

    def generate(self, name: str = "a", kind: RequestOutputKind = RequestOutputKind.DELTA):
        params = SamplingParams(max_tokens=8, output_kind=kind, detokenize=False)
        return self.engine.generate([1, 2, 3], params, name)

    async def begin(self, name: str = "a") -> tuple[Any, asyncio.Task[Any], str]:
        """A request that the engine has: its stream, who waits for its output, its name there."""
        stream, num_added = self.generate(name), len(self.client.added)
        waiting = asyncio.create_task(anext(stream))
        while len(self.client.added) == num_added:
            await asyncio.sleep(0.001)
        return stream, waiting, self.client.added[-1]


def new_engine() -> AsyncLLMEngine:
    return AsyncLLMEngine(EngineConfig(model=MODEL, skip_tokenizer_init=True))


@pytest.fixture
def run(monkeypatch):
    """Runs a test's coroutine with an engine that is ready."""

    @contextlib.asynccontextmanager
    async def started() -> AsyncIterator[Started]:
        ready = Started(monkeypatch)
        await ready.start()
        yield ready
        await ready.engine.close()

    def run_with_engine(test: Any) -> None:
        async def work() -> None:
            async with started() as ready:
                await asyncio.wait_for(test(ready), 20)

        asyncio.run(work())

    return run_with_engine


def test_an_id_that_is_taken_again_gets_no_tokens_of_the_request_that_was_left(run):
    async def test(ready: Started) -> None:
        first, waiting, old = await ready.begin("same")
        await ready.client.step(old, 11)
        assert (await waiting).outputs[0].token_ids == [11]
        await first.aclose()
        _, waiting, new = await ready.begin("same")
        await ready.client.step(old, 12, is_last=True)
        await ready.client.step(new, 21)
        output = await waiting
        assert (output.request_id, output.outputs[0].token_ids) == ("same", [21])
        assert ready.client.aborted == [old]

    run(test)


def test_an_id_in_use_is_refused_and_its_first_request_goes_on(run):
    async def test(ready: Started) -> None:
        _, waiting, engine_id = await ready.begin()
        with pytest.raises(InvalidRequestError, match="request_id must differ"):
            await anext(ready.generate())
        await ready.client.step(engine_id, 5)
        assert (await waiting).outputs[0].token_ids == [5]

    run(test)


def test_what_a_slow_client_has_not_taken_does_not_make_the_engine_look_stalled(run):
    async def test(ready: Started) -> None:
        _, waiting, engine_id = await ready.begin()
        await ready.client.step(engine_id, 5)
        await waiting
        await asyncio.sleep(0.03)
        assert ready.engine.seconds_since_news > 0.02
        await ready.client.step(engine_id, 6, is_last=True)
        await asyncio.sleep(0.03)
        assert ready.engine.num_unfinished_requests == 1
        assert ready.engine.seconds_since_news == 0

    run(test)


def test_a_stream_that_nobody_begins_is_never_sent(run):
    async def test(ready: Started) -> None:
        (submission,) = await ready.engine.prepare_prompts([1, 2], SamplingParams(max_tokens=2))
        await ready.engine.stream(submission).aclose()
        assert ready.client.added == [] and ready.engine.num_unfinished_requests == 0

    run(test)


def test_a_client_that_is_cancelled_while_it_waits_aborts_its_request_once(run):
    async def test(ready: Started) -> None:
        _, waiting, engine_id = await ready.begin()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled() and ready.client.aborted == [engine_id]
        assert ready.engine.num_unfinished_requests == 0

    run(test)


def test_a_request_that_no_frame_holds_is_refused_and_leaves_its_id_free(run):
    async def test(ready: Started) -> None:
        ready.client.refuses_frames = True
        with pytest.raises(InvalidRequestError, match="must fit a message: frames must have"):
            await anext(ready.generate())
        ready.client.refuses_frames = False
        assert ready.engine.num_unfinished_requests == 0
        await ready.begin()

    run(test)


def test_a_request_that_the_engine_refuses_fails_alone_and_is_not_aborted(run):
    async def test(ready: Started) -> None:
        _, refused, first = await ready.begin("a")
        _, waiting, second = await ready.begin("b")
        await ready.client.tell(RequestRefused(first, "no room"))
        with pytest.raises(InvalidRequestError, match="no room"):
            await refused
        await ready.client.step(second, 7)
        assert (await waiting).outputs[0].token_ids == [7] and ready.client.aborted == []

    run(test)


def test_news_that_cannot_be_taken_end_the_engine_and_tell_everyone(run, monkeypatch):
    async def test(ready: Started) -> None:
        _, waiting, engine_id = await ready.begin()

        def fail(output: object) -> None:
            raise RuntimeError("a fault of ours")

        monkeypatch.setattr(ready.engine._requests, "deliver", fail)
        await ready.client.step(engine_id, 5)
        with pytest.raises(EngineDeadError, match="news could not be taken: RuntimeError"):
            await waiting
        assert ready.engine.state is EngineState.DEAD and ready.client.is_killed

    run(test)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (RequestOutputKind.DELTA, [[1], [2, 3, 4]]),
        (RequestOutputKind.CUMULATIVE, [[1], [1, 2, 3, 4]]),
        (RequestOutputKind.FINAL_ONLY, [[1, 2, 3, 4]]),
    ],
)
def test_outputs_that_wait_are_joined_into_one(run, kind, expected):
    async def test(ready: Started) -> None:
        outputs, stream = [], ready.generate(kind=kind)
        waiting = asyncio.create_task(anext(stream))
        while not ready.client.added:
            await asyncio.sleep(0.001)
        (engine_id,) = ready.client.added
        await ready.client.step(engine_id, 1)
        if kind is not RequestOutputKind.FINAL_ONLY:
            outputs.append(await waiting)
        await ready.client.step(engine_id, 2, 3)
        await ready.client.step(engine_id, 4, is_last=True)
        outputs += [await waiting] if not outputs else []
        outputs += [output async for output in stream]
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "length"

    run(test)


def test_a_death_in_the_middle_still_gives_what_came_before_it(run):
    async def test(ready: Started) -> None:
        stream, waiting, engine_id = await ready.begin()
        ready.client.news.put_nowait(
            StepNews(
                [SequenceUpdate(request_id=engine_id, index=0, new_token_ids=(5,))], EngineStats()
            )
        )
        await ready.client.tell(EngineDeadError("gone"))
        assert (await waiting).outputs[0].token_ids == [5]
        with pytest.raises(EngineDeadError, match="gone"):
            await anext(stream)
        assert ready.client.aborted == [] and ready.engine.num_unfinished_requests == 0

    run(test)


def test_closing_ends_streams_and_text_work_and_may_be_repeated(run):
    async def test(ready: Started) -> None:
        _, waiting, _ = await ready.begin()
        await asyncio.gather(ready.engine.close(), ready.engine.close())
        with pytest.raises(EngineDeadError, match="was closed"):
            await waiting
        for late in (ready.engine.in_text_thread(lambda: 1), ready.engine.prepare_prompts([1])):
            with pytest.raises(EngineDeadError, match="was closed"):
                await late
        with pytest.raises(EngineDeadError, match="was closed"):
            await ready.engine.start()

    run(test)


def test_a_prompt_that_is_prepared_while_the_engine_closes_is_told_so(run):
    async def test(ready: Started) -> None:
        preparing = asyncio.create_task(ready.engine.prepare_prompts([1, 2]))
        await asyncio.sleep(0)
        await ready.engine.close()
        (submission,) = await preparing
        with pytest.raises(EngineDeadError, match="was closed"):
            await anext(ready.engine.stream(submission))

    run(test)


def test_an_engine_is_started_once(run):
    async def test(ready: Started) -> None:
        with pytest.raises(RuntimeError, match="start must be called once; got an engine that is"):
            await ready.engine.start()

    run(test)


def without_process(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))  # pyright: ignore[reportArgumentType]


def test_a_process_that_cannot_be_started_is_told_to_all_who_wait(monkeypatch):
    async def fail(config: EngineConfig) -> None:
        raise OSError("no more processes")

    async def work() -> None:
        engine = new_engine()
        waiting = asyncio.create_task(engine.wait_until_ready())
        for who_waits in (engine.start(), waiting):
            with pytest.raises(EngineDeadError, match="cannot be started: no more processes"):
                await who_waits
        await engine.close()

    monkeypatch.setattr(SocketClient, "start", fail)
    without_process(work())


def test_an_engine_that_is_closed_while_it_starts_leaves_no_process(monkeypatch):
    client, has_begun, may_end = ScriptedClient(), asyncio.Event(), asyncio.Event()

    async def start_slowly(config: EngineConfig) -> ScriptedClient:
        has_begun.set()
        await may_end.wait()
        return client

    async def work() -> None:
        engine = new_engine()
        starting = asyncio.create_task(engine.start())
        await has_begun.wait()
        await engine.close()
        may_end.set()
        with pytest.raises(EngineDeadError, match="was closed"):
            await starting
        assert client.num_closed == 1

    monkeypatch.setattr(SocketClient, "start", start_slowly)
    without_process(work())


def test_the_error_of_a_dead_engine_keeps_no_trace_of_those_who_were_told_it_before(run):
    async def test(ready: Started) -> None:
        await ready.client.tell(EngineDeadError("gone"))
        depths = []
        for _ in range(3):
            with pytest.raises(EngineDeadError, match="gone") as told:
                await anext(ready.generate())
            depths.append(len(told.traceback))
        assert depths[0] == depths[1] == depths[2]

    run(test)


def test_an_engine_that_was_never_started_can_be_closed():
    async def work() -> None:
        engine = new_engine()
        await engine.close()
        with pytest.raises(EngineDeadError, match="was closed"):
            await engine.wait_until_ready()

    without_process(work())


def test_a_refusal_is_told_although_the_process_has_ended_behind_it(monkeypatch):
    async def work() -> None:
        ready = Started(monkeypatch)
        await ready.engine.start()
        await ready.client.tell(StartRefused("block_size must fit"), EngineDeadError("has ended"))
        with pytest.raises(EngineDeadError, match="block_size must fit"):
            await ready.engine.wait_until_ready()
        assert ready.engine.is_refused
        await ready.engine.close()

    without_process(work())
