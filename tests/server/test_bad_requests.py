"""Requests that peers died of: each is the client's fault, and the next one is answered."""

import json
from typing import Any

import pytest

from tests.server.answers import error_of
from tests.server.scripted_engine import Served

pytestmark = pytest.mark.asyncio

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.bugbank
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_bugbank_R16_a_body_is_refused_as_soon_as_it_is_over_the_limit(path):
    sent = 0

    async def endless():
        nonlocal sent
        yield b'{"prompt": "'
        while sent < 1 << 31:
            sent += 65536
            yield b"\\n" * 32768

    async with Served(max_body_bytes=1 << 20) as served:
        response = await served.client.post(path, content=endless())
        assert str(1 << 20) in error_of(response, 413)
        assert response.headers["connection"] == "close"
        assert sent <= (1 << 20) + 131072
        for length in (str(1 << 40), "9" * 5000):
            headers = {"content-length": length}
            response = await served.client.post(path, content=b"{}", headers=headers)
            error_of(response, 413)
        assert (await served.chat()).status_code == 200


@pytest.mark.bugbank
async def test_bugbank_R16_of_a_text_far_too_long_only_the_beginning_is_tokenized(monkeypatch):
    async with Served() as served:
        sizes: list[int] = []
        encode = served.tokenizer.encode

        def watch(text: str, **options: Any) -> list[int]:
            sizes.append(len(text))
            return encode(text, **options)

        monkeypatch.setattr(served.tokenizer, "encode", watch)
        text = "xé" * 2_000_000
        for response in (await served.complete(text), await served.complete(["a", text])):
            assert "maximum context length is 2048" in error_of(response, 400, "prompt")
        parts = [{"type": "text", "text": text[:1_000_000]}] * 2
        for content in (text, parts):
            error_of(await served.chat(content), 400, "prompt")
        assert sizes and max(sizes) == 2 * 2048
        response = await served.client.post("/tokenize", json={"prompt": text})
        error_of(response, 400, "prompt")
        assert max(sizes) == 2 << 18


@pytest.mark.bugbank
async def test_bugbank_R16_a_prompt_longer_than_the_model_is_refused():
    async with Served() as served:
        response = await served.complete("\n" * 3_000_000, max_tokens=20)
        assert "This model's maximum context length is 2048 tokens" in error_of(
            response, 400, "prompt"
        )
        error_of(await served.complete("\n" * 4000, max_tokens=2000), 400, "max_tokens")
        assert not served.process.added


@pytest.mark.bugbank
async def test_bugbank_R12_a_malformed_body_leaves_the_server_well():
    async with Served() as served:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            for body in (b"", b"null", b"[]", b'"x"', b"NaN", b'{: "model"}', b"{} x", b'{"a"'):
                error_of(await served.client.post(path, content=body), 400)
            response = await served.client.post(path, content=b'{"model":"a","model":"b"}')
            error_of(response, 400, "model")
        headers = {"content-type": "text/plain"}
        response = await served.client.post(
            "/v1/chat/completions", content=json.dumps(CHAT), headers=headers
        )
        assert response.status_code == 200


@pytest.mark.bugbank
async def test_bugbank_R01_R02_R03_bad_ids_are_refused_and_the_next_request_is_answered():
    async with Served() as served:
        for bias in ({"AI": -100}, {"305": 5}, {"-1": 5}, {"2147483648": 5}):
            error_of(await served.chat(logit_bias=bias), 400, "logit_bias")
        for token_id in (-1, 300, 5000, 2**31 - 1, 2**31, 2**70):
            response = await served.chat(stop_token_ids=[token_id], min_tokens=5, max_tokens=300)
            error_of(response, 400, "stop_token_ids")
            for prompt in ([token_id], [[1], [5, token_id]]):
                response = await served.complete(prompt)
                error_of(response, 400, "prompt_token_ids")
        assert not served.process.added
        assert (await served.chat(max_tokens=3)).status_code == 200


@pytest.mark.bugbank
async def test_bugbank_R07_large_counts_are_refused_and_allowed_ones_complete():
    async with Served() as served:
        error_of(await served.complete(n=100_000, max_tokens=1), 400, "n")
        error_of(await served.complete(n=3, best_of=5), 400, "best_of")
        error_of(await served.complete(["a"] * 200), 400, "prompt")
        error_of(await served.complete(["a"] * 64, n=5), 400, "n")
        error_of(await served.complete(logprobs=21), 400, "logprobs")
        error_of(await served.chat(logprobs=True, top_logprobs=21), 400, "logprobs")
        error_of(await served.chat(stop=["x"] * 17), 400, "stop")
        error_of(await served.chat(stop=["x" * 257]), 400, "stop")
        assert not served.process.added
        answer = (await served.complete(n=128, max_tokens=1)).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(128))


@pytest.mark.bugbank
async def test_bugbank_R17_client_sent_embeddings_are_refused_by_name():
    async with Served() as served:
        for embeds in ("gASV", ["AAAA"], {"shape": [2**40]}):
            error_of(await served.complete(prompt_embeds=embeds), 400, "prompt_embeds")
