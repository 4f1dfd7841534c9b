"""The bound of the queue: by sequences and by prompt tokens, and never for ever."""

import asyncio
from contextlib import AbstractContextManager
from typing import Any

import pytest

from server.access.queue_bound import Place, QueueBound
from tests.server.answers import error_of
from tests.server.scripted_engine import INFO, Served, say, time_out
from tests.server.test_leaving_rate import Clock

pytestmark = [pytest.mark.asyncio, pytest.mark.bugbank]


async def waiting(served: Served, count: int, **fields: Any) -> list[asyncio.Task[Any]]:
    """Requests that the engine has and does not answer yet."""
    num_before = len(served.process.added)
    tasks = [asyncio.create_task(served.complete("abc", **fields)) for _ in range(count)]
    async with asyncio.timeout(10):
        while len(served.process.added) < num_before + count:
            await asyncio.sleep(0.001)
    return tasks


async def test_bugbank_R18_a_full_queue_refuses_at_once_and_takes_again_when_it_has_room():
    async with Served(max_num_queued_reqs=5) as served:
        served.process.hold()
        tasks = await waiting(served, 5)
        for ask in (served.chat, served.complete):
            for stream in (False, True):
                response = await ask(stream=stream)
                assert "5 sequences" in error_of(response, 429)
                assert int(response.headers["retry-after"]) >= 1
        assert len(served.process.added) == 5
        assert (await served.client.get("/health")).status_code == 200
        served.process.release()
        assert {response.status_code for response in await asyncio.gather(*tasks)} == {200}
        assert (await served.complete()).status_code == 200


async def test_bugbank_R18_choices_and_prompts_count_as_sequences():
    async with Served(max_num_queued_reqs=5) as served:
        served.process.hold()
        tasks = await waiting(served, 1, n=5)
        error_of(await served.complete(), 429)
        served.process.release()
        await asyncio.gather(*tasks)
        served.process.hold()
        tasks = [asyncio.create_task(served.complete(["a", "b"], n=3, max_tokens=2))]
        while len(served.process.added) < 3:
            await asyncio.sleep(0.001)
        error_of(await served.complete(), 429)
        served.process.release()
        await asyncio.gather(*tasks)


async def test_bugbank_R18_sequences_that_run_do_not_count():
    async with Served(max_num_queued_reqs=2) as served:
        served.process.num_running = 3
        assert (await served.complete(max_tokens=1)).status_code == 200
        served.process.hold()
        tasks = await waiting(served, 5)
        assert "2 sequences" in error_of(await served.complete(), 429)
        served.process.release()
        await asyncio.gather(*tasks)


async def test_bugbank_R18_prompt_tokens_that_wait_have_a_bound_too():
    async with Served(max_num_queued_tokens=100) as served:
        served.process.hold()
        tasks = [asyncio.create_task(served.complete([7] * 60)) for _ in range(2)]
        while len(served.process.added) < 2:
            await asyncio.sleep(0.001)
        assert "120 prompt tokens" in error_of(await served.complete("a"), 429)
        served.process.release()
        await asyncio.gather(*tasks)
        assert (await served.complete([7] * 1000)).status_code == 200


async def test_bugbank_R18_the_bounds_follow_from_the_engine_when_none_are_given():
    async with Served() as served:
        served.process.hold()
        tasks = await waiting(served, 256, max_tokens=1)
        assert "256 with 32768" in error_of(await served.complete(), 429)
        served.process.release()
        await asyncio.gather(*tasks)
    assert 32768 == 8 * (INFO.num_pages[0] - 1) * INFO.page_size


async def test_bugbank_R18_requests_that_are_still_prepared_count(monkeypatch):
    async with Served(say("a"), max_num_queued_reqs=3) as served:
        go = asyncio.Event()
        original = served.engine.prepare_prompts

        async def prepare(*arguments: Any, **keywords: Any) -> Any:
            await go.wait()
            return await original(*arguments, **keywords)

        monkeypatch.setattr(served.engine, "prepare_prompts", prepare)
        tasks = [asyncio.create_task(served.complete()) for _ in range(10)]
        await asyncio.sleep(0.05)
        go.set()
        statuses = [response.status_code for response in await asyncio.gather(*tasks)]
        assert statuses.count(200) == 3 and statuses.count(429) == 7


async def test_a_refusal_says_when_there_is_room_by_what_the_engine_finished_lately():
    async with Served(max_num_queued_reqs=2) as served:
        state, clock = served.app.state.server, Clock()
        queue = state.queue = QueueBound(served.engine, state.config, clock)
        submissions = await served.engine.prepare_prompts([7] * 50)

        def take_place() -> AbstractContextManager[Place]:
            place = queue.place()
            place.__enter__().take(submissions)
            return place

        async def refused() -> int:
            response = await served.complete()
            error_of(response, 429)
            return int(response.headers["retry-after"])

        first, second = take_place(), take_place()
        clock.now += 7
        assert await refused() == 7  # nothing has ended so far
        first.__exit__(None, None, None)
        third = take_place()
        clock.now += 5
        assert await refused() == 12  # one in 12 seconds
        second.__exit__(None, None, None)
        fourth = take_place()
        assert await refused() == 6
        failed = RuntimeError()
        third.__exit__(RuntimeError, failed, None)  # makes room, and tells nothing of the engine
        third = take_place()
        assert await refused() == 6
        assert queue.seconds_until_served() == 12
        for place in (third, fourth):
            place.__exit__(None, None, None)
        assert (await served.complete()).status_code == 200


async def test_a_request_that_waited_in_vain_is_told_when_those_that_wait_are_served():
    async with Served(time_out()) as served:
        state, clock = served.app.state.server, Clock()
        queue = state.queue = QueueBound(served.engine, state.config, clock)
        submissions = await served.engine.prepare_prompts([7] * 50)
        places = [queue.place() for _ in range(4)]
        for place in places:
            place.__enter__().take(submissions)
        clock.now += 10
        places.pop().__exit__(None, None, None)
        response = await served.complete(timeout=5)
        error_of(response, 503)
        assert response.headers["retry-after"] == "30"  # three, one in 10 seconds


async def test_a_place_is_given_back_however_its_request_ends():
    async with Served() as served:
        queue: QueueBound = served.app.state.server.queue
        bad: list[dict[str, Any]] = [{"temperature": 9}, {"model": "x"}, {"n": 0}]
        for fields in ({}, {"stream": True}, *bad):
            await served.chat(**fields)
            assert queue.num_requests == 0
