"""The routes of sleep: arguments, refusals meanwhile, answers of the engine, and the gauge."""

import asyncio

import httpx
import pytest

from jaxserve.distributed.messages import (
    EngineStats,
    FromEngine,
    MemoryChanged,
    ReleaseCache,
    RequestRefused,
    Sleep,
    ToEngine,
    WakeUp,
)
from jaxserve.errors import EngineDeadError
from tests.server.answers import error_of
from tests.server.scripted_engine import Served

pytestmark = pytest.mark.asyncio

ROUTES = ("/sleep", "/wake_up", "/release_kv_cache_memory")


async def command(
    served: Served, url: str, sent: ToEngine, *answers: FromEngine | EngineDeadError
) -> httpx.Response:
    """The server's answer to a command that the engine has got and answers so."""
    running = asyncio.create_task(served.client.post(url))
    while sent not in served.process.sent:
        assert not running.done(), await running
        await asyncio.sleep(0.001)
    served.process.sent.clear()
    for answer in answers:
        served.process.tell(answer)
    return await running


def changed(level: int) -> MemoryChanged:
    return MemoryChanged(EngineStats(sleep_level=level))


async def is_sleeping(served: Served) -> bool:
    return (await served.client.get("/is_sleeping")).json()["is_sleeping"]


async def gauge(served: Served) -> list[str]:
    """The states whose gauge is 1."""
    text = (await served.client.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("vllm:engine_sleep_state{")]
    assert len(lines) == 3
    return [line.split('sleep_state="')[1].split('"')[0] for line in lines if line.endswith(" 1.0")]


async def test_there_are_no_such_routes_without_the_flag_and_none_without_the_key():
    async with Served() as served:
        for url in ROUTES:
            error_of(await served.client.post(url), 404)
        error_of(await served.client.get("/is_sleeping"), 404)
    async with Served(enable_dev_routes=True, api_key=("key",)) as served:
        for url in ROUTES:
            error_of(await served.client.post(url), 401)
        error_of(await served.client.get("/is_sleeping"), 401)
        headers = {"authorization": "Bearer key"}
        error_of(await served.client.get("/sleep", headers=headers), 405)
        assert not served.process.sent


async def test_requests_are_refused_from_the_command_until_all_is_back():
    async with Served(enable_dev_routes=True) as served:
        assert await gauge(served) == ["awake"] and not await is_sleeping(served)
        running = asyncio.create_task(served.client.post("/sleep?level=2&mode=wait"))
        while not served.process.sent:
            await asyncio.sleep(0.001)
        assert served.process.sent == [Sleep(2, "wait")]
        assert await is_sleeping(served) and await gauge(served) == ["awake"]
        for stream in (False, True):
            for ask in (served.chat, served.complete):
                response = await ask(stream=stream)
                assert "must be awake" in error_of(response, 503)
                assert response.headers["retry-after"]
        served.process.tell(changed(2))
        response = await running
        assert (response.status_code, response.content) == (200, b"")
        assert await is_sleeping(served) and await gauge(served) == ["discard_all"]
        assert (await served.client.get("/health")).status_code == 200
        assert (await served.client.get("/v1/models")).status_code == 200
        assert (await served.client.post("/tokenize", json={"prompt": "a"})).status_code == 200
        error_of(await served.complete(), 503)
        assert served.process.added == []
        await command(served, "/wake_up?tags=weights", WakeUp(("weights",)), changed(1))
        assert await is_sleeping(served) and await gauge(served) == ["weights_offloaded"]
        error_of(await served.complete(), 503)
        await command(served, "/wake_up", WakeUp(("weights", "kv_cache")), changed(0))
        assert not await is_sleeping(served) and await gauge(served) == ["awake"]
        assert (await served.complete()).status_code == 200


async def test_arguments_are_checked_before_anything_is_sent():
    async with Served(enable_dev_routes=True) as served:
        for url, name, words in (
            ("/sleep?level=0", "level", "must be 1 or 2 in this release; got 0"),
            ("/sleep?level=x", "level", "must be an integer; got 'x'"),
            (f"/sleep?level={'9' * 5000}", "level", "must be an integer"),
            ("/sleep?mode=pause", "mode", "must be one of abort, wait, keep; got 'pause'"),
            ("/wake_up?tags=scheduling", "tags", "must be a list of weights and kv_cache"),
            ("/wake_up?tags=weights&tags=x", "tags", "must be a list of weights and kv_cache"),
        ):
            assert words in error_of(await served.client.post(url), 400, name)
        assert not served.process.sent
        sent = Sleep(1, "abort")
        assert (await command(served, "/sleep", sent, changed(1))).status_code == 200
        both = "/wake_up?tags=kv_cache&tags=weights"
        sent = WakeUp(("kv_cache", "weights"))
        assert (await command(served, both, sent, changed(0))).status_code == 200


async def test_what_the_engine_refuses_or_cannot_do_is_told():
    async with Served(enable_dev_routes=True) as served:
        url, sent = "/release_kv_cache_memory", ReleaseCache()
        refused = MemoryChanged(EngineStats(), "got 1", is_refusal=True)
        assert error_of(await command(served, url, sent, refused), 400) == "got 1"
        assert (await command(served, url, sent, changed(0))).status_code == 200
        failed = MemoryChanged(EngineStats(), "the weights must go to the host's memory; got none")
        answer = await command(served, "/sleep", Sleep(1, "abort"), failed)
        assert "the host's memory" in error_of(answer, 503)
        assert not await is_sleeping(served)
        assert (await served.complete()).status_code == 200


async def test_a_request_that_finds_no_memory_for_the_cache_may_be_asked_again():
    async with Served(enable_dev_routes=True) as served:
        served.process.hold()
        running = asyncio.create_task(served.complete())
        while not served.process.added:
            await asyncio.sleep(0.001)
        name = served.process.added[0].request_id
        served.process.tell(RequestRefused(name, "the cache must come back", is_not_ready=True))
        assert error_of(await running, 503) == "the cache must come back"


async def test_a_client_that_leaves_its_command_takes_no_answer_of_another():
    async with Served(enable_dev_routes=True) as served:
        gone = asyncio.create_task(served.engine.sleep())
        waking = asyncio.create_task(served.engine.wake_up())
        while len(served.process.sent) < 2:
            await asyncio.sleep(0.001)
        gone.cancel()
        served.process.tell(changed(1))
        await asyncio.sleep(0.01)
        assert not waking.done() and await served.engine.is_sleeping()
        served.process.tell(changed(0))
        await waking
        assert not await served.engine.is_sleeping()


async def test_a_command_that_the_engine_does_not_live_to_answer_is_an_error():
    async with Served(enable_dev_routes=True) as served:
        dead = EngineDeadError("killed")
        error_of(await command(served, "/sleep", Sleep(1, "abort"), dead), 503)
        error_of(await served.client.post("/wake_up"), 503)
