"""The application around its routes: states, errors, names of requests, tokens."""

import asyncio
import time

import msgspec
import pytest

import jaxserve
from jaxserve.errors import EngineDeadError
from tests.server.answers import error_of, events
from tests.server.scripted_engine import INFO, Served, say

pytestmark = pytest.mark.asyncio
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def test_models_are_listed_and_shown_under_all_names():
    async with Served() as served:
        listed = (await served.client.get("/v1/models")).json()
        assert [card["id"] for card in listed["data"]] == ["tiny", "alias"]
        assert listed["data"][0]["max_model_len"] == 2048
        assert (await served.client.get("/v1/models/alias")).json()["id"] == "alias"
        for name in ("nope", "a/b", "tiny/"):
            message = error_of(await served.client.get(f"/v1/models/{name}"), 404, "model")
            assert f"`{name}`" in message and "`tiny`, `alias`" in message
        answer = (await served.chat(model="alias")).json()
        assert answer["model"] == "tiny"
        error_of(await served.chat(model="nope"), 404, "model")
        error_of(await served.complete(model="x" * 500), 404, "model")


async def test_health_tells_how_far_the_start_is():
    served = Served()
    await served.start(is_ready=False)
    try:
        await asyncio.sleep(0)
        for path in ("/health", "/ping"):
            response = await served.client.get(path)
            assert response.status_code == 503
            body = {"status": "starting", "stage": "compile", "done": 3, "total": 7}
            assert response.json() == body
        response = await served.chat()
        error_of(response, 503)
        assert int(response.headers["retry-after"]) > 0
        assert (await served.client.get("/version")).json() == {"version": jaxserve.__version__}
        error_of(await served.client.post("/tokenize", json={"messages": CHAT["messages"]}), 503)
    finally:
        await served.__aexit__()


async def test_health_is_empty_and_good_when_ready_and_bad_when_draining_or_dead():
    async with Served() as served:
        for method in ("GET", "HEAD"):
            response = await served.client.request(method, "/health")
            assert (response.status_code, response.content) == (200, b"")
        assert (await served.client.post("/ping")).status_code == 200
        served.app.state.server.is_draining = True
        assert (await served.client.get("/health")).json()["status"] == "draining"
        response = await served.chat()
        assert "leave" in error_of(response, 503)
        assert response.headers["connection"] == "close" and "retry-after" in response.headers
        served.app.state.server.is_draining = False
        served.process.tell(EngineDeadError("killed: /secret/path"))
        await asyncio.sleep(0.01)
        assert (await served.client.get("/health")).json()["status"] == "dead"
        assert "secret" not in error_of(await served.chat(), 503)


async def test_requests_that_run_when_draining_begins_end_well():
    async with Served() as served:
        served.process.hold()
        running = asyncio.create_task(served.chat(stream=True))
        while not served.process.added:
            await asyncio.sleep(0.001)
        served.app.state.server.is_draining = True
        served.process.release()
        assert events(await running)[-1] == "[DONE]"


@pytest.mark.bugbank
async def test_bugbank_R20_a_silent_engine_with_work_makes_health_bad():
    async with Served(watchdog_seconds=5) as served:
        served.process.hold()
        running = asyncio.create_task(served.chat())
        while not served.process.added:
            await asyncio.sleep(0.001)
        assert (await served.client.get("/health")).status_code == 200
        served.engine._last_news_seconds -= 6
        assert (await served.client.get("/health")).json() == {"status": "stalled"}
        served.process.release()
        assert (await running).status_code == 200
        assert (await served.client.get("/health")).status_code == 200


async def test_unknown_routes_and_methods_are_errors_of_the_same_shape():
    async with Served() as served:
        for path in ("/", "/v1", "/v1/chat/completions/", "//v1/models", "/v2/models", "/%ff"):
            error_of(await served.client.get(path), 404)
        response = await served.client.get("/v1/chat/completions")
        error_of(response, 405)
        assert response.headers["allow"] == "POST"
        response = await served.client.post("/v1/models", content=b"x")
        error_of(response, 405)
        assert response.headers["connection"] == "close"


async def test_requests_get_the_clients_name_or_a_new_one():
    async with Served(enable_request_id_headers=True) as served:
        post = served.client.post
        response = await post("/v1/chat/completions", json=CHAT, headers={"X-Request-Id": "mine"})
        assert response.headers["x-request-id"] == "mine"
        assert response.json()["id"] == "chatcmpl-mine"
        for bad in (b"a b", b"\xff", b"x" * 200, b""):
            headers = {b"x-request-id": bad}
            response = await post("/v1/chat/completions", json=CHAT, headers=headers)
            assert len(response.headers["x-request-id"]) == 32
        assert len((await served.client.get("/nope")).headers["x-request-id"]) == 32
        assert (await served.chat(request_id="body")).json()["id"] == "chatcmpl-body"
    async with Served() as served:
        assert "x-request-id" not in (await served.chat()).headers


async def test_two_requests_may_have_the_same_name_at_the_same_time():
    async with Served() as served:
        answers = await asyncio.gather(*(served.chat(request_id="same") for _ in range(4)))
        assert {answer.json()["id"] for answer in answers} == {"chatcmpl-same"}


async def test_unknown_fields_are_told_in_a_header_or_refused_when_strict():
    async with Served() as served:
        for stream in (False, True):
            response = await served.chat(zeta=1, alpha=2, stream=stream)
            assert response.status_code == 200
            assert response.headers["x-jaxserve-ignored-fields"] == "alpha,zeta"
        assert "x-jaxserve-ignored-fields" not in (await served.chat()).headers
        response = await served.client.post("/tokenize", json={"prompt": "a", "zeta": 1})
        assert response.headers["x-jaxserve-ignored-fields"] == "zeta"
    async with Served(strict=True) as served:
        error_of(await served.chat(zeta=1), 400, "zeta")


@pytest.mark.bugbank
async def test_bugbank_R32_a_logged_prompt_is_cut_between_characters(caplog):
    text = "漢字😀" * 200
    async with Served(enable_log_requests=True, max_log_len=10) as served:
        with caplog.at_level("INFO", logger="server"):
            assert (await served.complete(text, max_tokens=1)).status_code == 200
            assert (await served.complete([1] * 50, max_tokens=1)).status_code == 200
    assert repr(text[:10]) in caplog.text and text[:11] not in caplog.text
    caplog.clear()
    async with Served() as served:
        with caplog.at_level("DEBUG", logger="server"):
            await served.complete("private words", max_tokens=1)
    assert "private" not in caplog.text


async def test_an_error_inside_the_server_tells_nothing_and_the_next_request_is_answered(
    monkeypatch,
):
    async with Served() as served:
        with monkeypatch.context() as patch:
            patch.setattr(served.engine, "prepare_chat", None)
            assert error_of(await served.chat(), 500) == "internal server error"
        assert (await served.chat(max_tokens=1)).status_code == 200


async def test_load_counts_unfinished_requests():
    async with Served() as served:
        served.process.hold()
        running = [asyncio.create_task(served.complete()) for _ in range(3)]
        while len(served.process.added) < 3:
            await asyncio.sleep(0.001)
        assert (await served.client.get("/load")).json() == {"server_load": 3}
        served.process.release()
        await asyncio.gather(*running)
        assert (await served.client.get("/load")).json() == {"server_load": 0}


async def test_texts_and_chats_become_tokens_and_tokens_text():
    async with Served() as served:
        post = served.client.post
        text = "héllo <|im_end|> 😀"
        made = (await post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
        assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
        assert made["max_model_len"] == 2048
        back = (await post("/detokenize", json={"tokens": made["tokens"]})).json()
        assert back == {"prompt": text}
        made = (await post("/tokenize", json=CHAT)).json()
        assert made["token_strs"] is None
        await served.chat()
        assert list(served.process.added[0].request().prompt_token_ids) == made["tokens"]
        for body, param in (
            ({}, "prompt"),
            ({"prompt": "a", **CHAT}, "prompt"),
            ({**CHAT, "add_special_tokens": True}, "add_special_tokens"),
            ({**CHAT, "chat_template": "{{ 1 }}"}, "chat_template"),
            ({"messages": [{"role": "x", "content": ""}]}, "messages[0].role"),
        ):
            error_of(await post("/tokenize", json=body), 400, param)
        for tokens, param in (
            ([300], "tokens"),
            ([-1], "tokens"),
            (["a"], "tokens"),
            ([2**40], "tokens"),
            (5, "tokens"),
        ):
            response = await post("/detokenize", json={"tokens": tokens})
            assert error_of(response, 400, response.json()["error"]["param"]).startswith(param)
        error_of(await post("/detokenize", json={"model": "x", "tokens": []}), 404, "model")


@pytest.mark.bugbank
async def test_bugbank_R19_health_answers_while_large_prompts_are_read():
    size = 1 << 20
    info = msgspec.structs.replace(
        INFO, max_model_len=size, max_tokens_per_sequence=size, num_pages=(size,)
    )
    async with Served(say("a"), info=info) as served:
        text = "some words, é and 😀 " * (1 << 15)
        running = [asyncio.create_task(served.chat(text)) for _ in range(8)]
        waits: list[float] = []
        while not all(task.done() for task in running):
            start = time.perf_counter()
            assert (await served.client.get("/health")).status_code == 200
            waits.append(time.perf_counter() - start)
            await asyncio.sleep(0.01)
        assert {task.result().status_code for task in running} == {200}
        assert len(waits) > 10 and sorted(waits)[len(waits) * 9 // 10] < 0.5, waits
