"""Salt, priority, deadline and goals in HTTP bodies; deadlines that pass; the prefix cache."""

import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest

from jaxserve.async_llm_engine import AsyncLLMEngine
from jaxserve.config import EngineConfig
from jaxserve.distributed.messages import PrefixCacheReset, ResetPrefixCache
from jaxserve.errors import EngineDeadError
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.step import SequenceUpdate
from server.app import create_app
from server.config import ServerConfig
from tests.server.answers import USAGE, error_of, events, strict
from tests.server.scripted_engine import Served, say, time_out
from tests.tiny_llm import MODEL, SETTINGS, write_tokenizer

pytestmark = pytest.mark.asyncio

FIELDS: dict[str, Any] = {
    "cache_salt": "tenant",
    "timeout": 30,
    "skip_reading_prefix_cache": True,
}

OF_POLICIES: dict[str, dict[str, Any]] = {
    "priority": {"priority": -2},
    "slo": {"ttft_goal_ms": 200, "tpot_goal_ms": 12.5},
}


@pytest.mark.parametrize("policy", OF_POLICIES)
async def test_the_fields_of_a_body_reach_the_engine_at_both_routes(policy):
    config = {"scheduling_policy": policy}
    async with Served(strict=True, default_request_timeout=60.0, engine_config=config) as served:
        for ask in (served.chat, served.complete):
            for stream in (False, True):
                fields = FIELDS | OF_POLICIES[policy]
                assert (await ask(stream=stream, **fields)).status_code == 200
                request = served.process.added[-1].request()
                assert (request.cache_salt, request.timeout_seconds) == ("tenant", 30.0)
                goals = (request.ttft_goal_seconds, request.tpot_goal_seconds)
                expected = (-2, None, None) if policy == "priority" else (0, 0.2, 0.0125)
                assert (request.priority, *goals) == expected
                assert request.sampling_params.skip_reading_prefix_cache is True
                await ask(stream=stream)
                request = served.process.added[-1].request()
                assert (request.timeout_seconds, request.priority) == (60.0, 0)
                assert request.cache_salt is request.ttft_goal_seconds is None


async def test_several_prompts_of_a_body_get_the_same_fields():
    async with Served(engine_config={"scheduling_policy": "priority"}) as served:
        response = await served.complete(["a", "b"], **FIELDS, **OF_POLICIES["priority"])
        assert response.status_code == 200
        requests = [message.request() for message in served.process.added]
        assert [(r.cache_salt, r.priority) for r in requests] == [("tenant", -2)] * 2
        assert [request.timeout_seconds for request in requests] == [30.0] * 2


async def test_a_bad_field_is_refused_by_name_and_nothing_runs():
    async with Served() as served:
        for ask in (served.chat, served.complete):
            for name, value in (
                ("cache_salt", ""),
                ("priority", 2**63),
                ("timeout", -1),
                ("ttft_goal_ms", 0),
                ("tpot_goal_ms", "fast"),
            ):
                assert error_of(await ask(**{name: value}), 400, name).startswith(f"{name} must")
        assert not served.process.added


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest-first", "slo"])
async def test_what_the_policy_does_not_go_by_is_refused_and_nothing_runs(policy):
    async with Served(engine_config={"scheduling_policy": policy}) as served:
        for needed, fields in OF_POLICIES.items():
            for name, value in fields.items() if needed != policy else ():
                for ask in (served.chat, served.complete):
                    message = error_of(await ask(**{name: value}), 400, name)
                    got = value if name == "priority" else float(value)
                    assert f"under the scheduling policy {policy}; got {got}; it" in message
        assert not served.process.added
        assert (await served.chat(priority=0, ttft_goal_ms=None)).status_code == 200


async def test_a_request_that_never_ran_is_answered_503_and_when_to_come_again():
    async with Served(time_out()) as served:
        for ask in (served.chat, served.complete):
            for fields in ({}, {"n": 3}, {"stream": True}, {"stream": True, "n": 3}):
                response = await ask(timeout=5, **fields)
                assert "must run before its timeout" in error_of(response, 503)
                assert response.headers["retry-after"] == "1"
                assert response.headers["content-type"] == "application/json"
        assert served.engine.num_unfinished_requests == 0 and not served.process.aborted
        assert served.app.state.server.queue.num_requests == 0
        shown = (await served.client.get("/metrics")).text
        assert 'finished_reason="timeout",model_name="tiny"} 16.0' in shown


async def test_several_prompts_are_refused_only_when_none_of_them_ran():
    async with Served(time_out()) as served:
        for stream in (False, True):
            response = await served.complete(["a", "bb"], stream=stream, timeout=5)
            assert error_of(response, 503)
    async with Served(time_out(only="a")) as served:
        answer = (await served.complete(["a", "bb"], timeout=5)).json()
        found = [(c["text"], c["finish_reason"]) for c in answer["choices"]]
        assert found == [("", "timeout"), ("abcdefgh", "stop")]
        data = events(await served.complete(["a", "bb"], stream=True, timeout=5))
        assert data[-1] == "[DONE]"
        choices = [choice for text in data[:-1] for choice in strict(text)["choices"]]
        assert choices[0] == {
            "index": 0, "text": "", "logprobs": None, "finish_reason": "timeout",
            "stop_reason": None,
        }  # fmt: skip
        assert "".join(c["text"] for c in choices if c["index"] == 1) == "abcdefgh"


async def test_what_a_request_said_before_its_deadline_is_its_answer():
    async with Served(time_out(num_tokens=3)) as served:
        for ask in (served.chat, served.complete):
            choice = (await ask(timeout=5)).json()["choices"][0]
            assert choice["finish_reason"] == "timeout"
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            assert text and text != "abcdefgh" and "abcdefgh".startswith(text)
            data = events(await ask(stream=True, timeout=5))
            assert strict(data[-2])["choices"][0]["finish_reason"] == "timeout"
            assert data[-1] == "[DONE]"


async def test_a_stream_that_has_begun_tells_of_the_deadline_in_an_event():
    """Without a limit of its own it begins at once, and with comments at the first of them."""
    cases: list[tuple[dict[str, Any], dict[str, Any]]]
    cases = [({}, {}), ({"timeout": 5}, {"sse_keep_alive_interval": 0.01})]
    for fields, config in cases:
        async with Served(time_out(), **config) as served:
            served.process.hold()
            running = asyncio.create_task(served.chat(stream=True, **fields))
            await asyncio.sleep(0.1)
            served.process.release()
            response = await running
            assert response.status_code == 200
            *_, failed, done, rest = response.text.split("\n\n")
            assert json.loads(failed.removeprefix("data: "))["error"]["code"] == 503
            assert (done, rest) == ("data: [DONE]", "")


async def test_a_stream_with_a_deadline_begins_with_its_first_event():
    async with Served() as served:
        served.process.hold()
        running = asyncio.create_task(served.chat(stream=True, timeout=5))
        while not served.process.added:
            await asyncio.sleep(0.001)
        served.process.tell(EngineDeadError("killed"))
        error_of(await running, 503)
    async with Served() as served:
        assert events(await served.chat(stream=True, timeout=5))[-1] == "[DONE]"


async def test_under_a_limit_of_the_queue_every_stream_waits_for_its_first_event():
    config = {"max_queue_time": 5}
    async with Served(time_out(), engine_config=config) as served:
        for stream in (False, True):
            message = error_of(await served.chat(stream=stream), 503)
            assert "within max_queue_time" in message
    async with Served(engine_config=config) as served:
        served.process.hold()
        running = asyncio.create_task(served.chat(stream=True))
        while not served.process.added:
            await asyncio.sleep(0.001)
        served.process.tell(EngineDeadError("killed"))
        error_of(await running, 503)


async def test_the_cache_is_reset_only_where_the_server_has_routes_for_developers():
    async with Served() as served:
        error_of(await served.client.post("/reset_prefix_cache"), 404)
    async with Served(enable_dev_routes=True, api_key=("key",)) as served:
        error_of(await served.client.post("/reset_prefix_cache"), 401)
        headers = {"authorization": "Bearer key"}
        error_of(await served.client.get("/reset_prefix_cache", headers=headers), 405)
        for name in ("reset_running_requests", "reset_external"):
            for value, rule in (
                ("true", "not supported"),
                ("1", "not supported"),
                ("x", "true or"),
            ):
                url = f"/reset_prefix_cache?{name}={value}"
                assert rule in error_of(await served.client.post(url, headers=headers), 400, name)
        assert not served.process.sent
        url = "/reset_prefix_cache?reset_external=false"
        running = [asyncio.create_task(served.client.post(url, headers=headers)) for _ in range(2)]
        while served.process.sent != [ResetPrefixCache()] * 2:
            await asyncio.sleep(0.001)
        running[0].cancel()
        served.process.tell(PrefixCacheReset())
        served.process.tell(PrefixCacheReset())
        response = await running[1]
        assert (response.status_code, response.content) == (200, b"")


async def test_a_reset_that_the_engine_does_not_live_to_answer_is_an_error():
    async with Served(enable_dev_routes=True) as served:
        running = asyncio.create_task(served.client.post("/reset_prefix_cache"))
        while not served.process.sent:
            await asyncio.sleep(0.001)
        served.process.tell(EngineDeadError("killed"))
        error_of(await running, 503)
        error_of(await served.client.post("/reset_prefix_cache"), 503)


async def test_cached_tokens_are_told_a_request_whole_and_in_each_chunk():
    def script(request: Request, index: int) -> list[SequenceUpdate]:
        facts = {
            "num_cached_tokens": 16 * len(request.prompt_token_ids) + index,
            "scheduled_seconds": 1.0 + index,
        }
        return [msgspec.structs.replace(u, **facts) for u in say("abc")(request, index)]

    async with Served(script, enable_prompt_tokens_details=True) as served:
        for prompts, num_cached in (("a", 16), ("bb", 32), (["a", "bb"], 48)):
            answer = (await served.complete(prompts, n=2)).json()
            assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": num_cached}
            options = {**USAGE, "continuous_usage_stats": True}
            data = events(await served.complete(prompts, n=2, stream=True, stream_options=options))
            usages = [strict(text)["usage"] for text in data[:-1]]
            assert usages[-1]["prompt_tokens_details"] == {"cached_tokens": num_cached}
            counts = {usage["prompt_tokens_details"]["cached_tokens"] for usage in usages}
            assert counts <= ({num_cached} if isinstance(prompts, str) else {16, 32, 48})


async def test_a_real_engine_finds_equal_prompts_of_equal_salt(tmp_path):
    config = EngineConfig(model=MODEL, tokenizer=str(write_tokenizer(tmp_path)), **SETTINGS)
    prompt = [(7 * i) % 200 + 10 for i in range(40)]
    engine = AsyncLLMEngine(config)
    settings = ServerConfig(enable_prompt_tokens_details=True, enable_dev_routes=True)
    transport = httpx.ASGITransport(create_app(engine, settings))
    client = httpx.AsyncClient(transport=transport, base_url="http://server")

    async def ask(**fields: Any) -> tuple[str, int]:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 6, **fields}
        answer = (await client.post("/v1/completions", json=body)).json()
        usage = answer["usage"]["prompt_tokens_details"]
        return answer["choices"][0]["text"], usage["cached_tokens"]

    async def generate(**fields: Any) -> tuple[str, int | None]:
        params = SamplingParams(temperature=0, max_tokens=6)
        asked = {"prompt_token_ids": prompt, **fields}
        *_, last = [output async for output in engine.generate(asked, params, priority=0)]
        return last.outputs[0].text, last.num_cached_tokens

    try:
        await engine.start()
        await engine.wait_until_ready()
        text, num_cached = await ask()
        assert num_cached == 0
        assert await ask() == await ask(priority=0, timeout=600) == (text, 39)
        assert await ask(skip_reading_prefix_cache=True) == (text, 0)
        assert await ask(cache_salt="a") == (text, 0)
        assert await ask(cache_salt="a") == await generate(cache_salt="a") == (text, 39)
        assert await generate(cache_salt="b") == (text, 0)
        assert await engine.reset_prefix_cache() is True
        assert await generate() == (text, 0)
        assert (await client.post("/reset_prefix_cache")).status_code == 200
        assert await ask() == (text, 0)
        assert await generate() == (text, 39)
    finally:
        await client.aclose()
        await engine.close()
