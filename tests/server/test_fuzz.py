"""Fuzzed requests: whatever a client sends, it gets an answer that is not the server's failure."""

import asyncio
import json
import random
from typing import Any

import pytest

from tests.server.scripted_engine import Served, say

pytestmark = pytest.mark.asyncio

CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ],
    "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "n": 1, "stop": ["x"], "stream": False,
    "logprobs": True, "top_logprobs": 2, "seed": 1, "tools": [], "tool_choice": "none",
    "chat_template_kwargs": {"a": 1}, "logit_bias": {}, "response_format": {"type": "text"},
}  # fmt: skip
COMPLETION: dict[str, Any] = {
    "model": "tiny", "prompt": ["a", "b"], "max_tokens": 3, "temperature": 1, "logprobs": 1,
    "echo": False, "n": 2, "stream": True, "stream_options": {"include_usage": True},
    "stop": "zz", "stop_token_ids": [5], "min_tokens": 0, "top_k": 3, "min_p": 0.1,
    "return_token_ids": True, "ignore_eos": False, "skip_special_tokens": True,
}  # fmt: skip
TOKENIZE: dict[str, Any] = {"messages": CHAT["messages"], "return_token_strs": True}
DETOKENIZE: dict[str, Any] = {"tokens": [1, 2, 3]}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
}
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 129, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0,
    1e308, "", "a", "\x00", "é😀", "\u202e\u200b", "a" * 300, "{{ 7 * 7 }}", "<|im_end|>",
    [], [None], ["a", 1], [[]], [[1], ["a"]], [1] * 50, {}, {"a": None}, {"type": "json_object"},
    {"type": "text", "text": 5}, [{"role": "user"}], [{"role": "user", "content": [[]]}], "auto",
]  # fmt: skip
NAMES = [
    *sorted(CHAT.keys() | COMPLETION.keys() | TOKENIZE.keys()),
    "suffix", "user", "logit_bias", "bad_words", "allowed_token_ids", "cache_salt", "priority",
    "timeout", "ttft_goal_ms", "tpot_goal_ms", "skip_reading_prefix_cache",
    "request_id", "documents", "reasoning_effort", "chat_template", "structured_outputs",
    "prompt_logprobs", "prompt_embeds", "vllm_xargs", "functions", "best_of", "unknown", "\r\nx",
    "continue_final_message", "add_generation_prompt", "max_completion_tokens", "stream_interval",
]  # fmt: skip


def mutated(value: Any, draw: random.Random) -> Any:
    """A copy with something inside replaced, removed, repeated or added."""
    if draw.random() < 0.25 or not isinstance(value, dict | list) or not value:
        return draw.choice(VALUES)
    if isinstance(value, dict):
        key, copied = draw.choice(sorted(value)), dict(value)
        match draw.randrange(4):
            case 0:
                del copied[key]
            case 1:
                copied[draw.choice(NAMES)] = draw.choice(VALUES)
            case _:
                copied[key] = mutated(value[key], draw)
        return copied
    position, items = draw.randrange(len(value)), list(value)
    if draw.random() < 0.3:
        return items * draw.choice([0, 2, 40])
    items[position] = mutated(items[position], draw)
    return items


def fuzzed_body(path: str, draw: random.Random) -> bytes:
    """A body that is nearly right, or has broken bytes."""
    value: Any = BODIES[path]
    for _ in range(draw.choice([1, 1, 2, 4])):
        value = mutated(value, draw) if isinstance(value, dict) else value
    body = json.dumps(value, ensure_ascii=draw.random() < 0.5).encode()
    if draw.random() < 0.2:
        start = draw.randrange(len(body) + 1)
        noise = draw.choice([b"", b"\xff", b"\x00", b'"', b"\\ud800", b"[" * 70, b"9" * 5000, b","])
        body = body[:start] + noise + body[start + draw.randrange(3) :]
    return body


async def check_answer(response: Any) -> None:
    """It has a status below 500, and the body that goes with it."""
    assert response.status_code in (200, 400, 404, 413), (response.status_code, response.text)
    if response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in response.text
        return
    body = json.loads(response.content, parse_constant=pytest.fail)
    if response.status_code != 200:
        assert body["error"].keys() == {"message", "type", "param", "code"}
        assert body["error"]["code"] == response.status_code
        assert len(body["error"]["message"]) < 2000


async def fuzz(seed: int, count: int) -> dict[int, int]:
    """Send requests, 8 at a time; returns how many had each status."""
    draw = random.Random(seed)
    statuses: dict[int, int] = {}
    async with Served(say("ok")) as served:

        async def send(path: str, body: bytes) -> None:
            response = await served.client.post(path, content=body)
            try:
                await check_answer(response)
            except AssertionError as error:
                raise AssertionError(f"{path} {body[:2000]!r}") from error
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1

        for _ in range(count // 8):
            paths = draw.choices(list(BODIES), weights=[4, 4, 1, 1], k=8)
            async with asyncio.TaskGroup() as group:
                for path in paths:
                    group.create_task(send(path, fuzzed_body(path, draw)))
        assert served.engine.num_unfinished_requests == 0
        assert (await served.chat()).status_code == 200
    return statuses


async def test_two_thousand_fuzzed_requests_give_no_server_error():
    statuses = await fuzz(seed=1, count=2_000)
    assert statuses[400] > 500 and statuses[200] > 50


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 7))
async def test_fifty_thousand_fuzzed_requests_give_no_server_error(seed):
    statuses = await fuzz(seed=seed, count=10_000)
    assert statuses[400] > 2500 and statuses[200] > 250
