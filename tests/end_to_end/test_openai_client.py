"""The real openai client against a real server process: it gets what the offline LLM gives."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from jaxserve.llm import LLM
from jaxserve.outputs import CompletionOutput
from jaxserve.sampling_params import SamplingParams
from tests.end_to_end.test_serve_process import HEADERS, KEY, Served, free_port, serving
from tests.tiny_llm import GOLDEN, MODEL, SETTINGS, to_text, write_tokenizer

NUM_TOKENS = 24
GREEDY: dict[str, Any] = {
    "temperature": 0,
    "max_tokens": NUM_TOKENS,
    "extra_body": {"ignore_eos": True, "return_token_ids": True},
}
MESSAGES: list[Any] = [
    {"role": "system", "content": "w20 w30"},
    {"role": "user", "content": "w40 w50"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def served(tokenizer: Path) -> Iterator[tuple[Served, str]]:
    """A server under two names, and its address."""
    port = free_port()
    words = ("--host", "127.0.0.1", "--port", str(port), "--watchdog-seconds", "1")
    with serving(tokenizer, *words, "--served-model-name", "tiny", "org/tiny") as served:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=HEADERS) as http:
            served.wait_until_ready(http)
        yield served, f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def url(served: tuple[Served, str]) -> str:
    return f"{served[1]}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def llm(tokenizer: Path) -> LLM:
    return LLM(MODEL, tokenizer=str(tokenizer), **SETTINGS)


def offline(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[CompletionOutput]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
    outputs = llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def check_equal(ids: Sequence[int], wanted: CompletionOutput) -> None:
    """The ids are those of the offline run, up to the first near-tie."""
    assert wanted.logprobs is not None
    num_equal = 0
    for entries in wanted.logprobs:
        best = sorted((entry.logprob for entry in entries.values()), reverse=True)
        if best[0] - best[1] < 0.001:
            break
        num_equal += 1
    assert num_equal > 4, "too early a near-tie proves nothing"
    assert list(ids[:num_equal]) == wanted.token_ids[:num_equal]


def golden_prompts(count: int) -> list[list[int]]:
    short = [list(case.prompt) for case in GOLDEN.mixed if len(case.prompt) <= 60]
    return [short[number % len(short)] for number in range(count)]


def test_completions_are_the_offline_ones_whole_and_streamed(client, llm):
    prompts = golden_prompts(3)
    for prompt, wanted in zip(prompts, offline(llm, prompts), strict=True):
        whole = client.completions.create(model="tiny", prompt=prompt, logprobs=2, **GREEDY)
        choice = whole.choices[0]
        check_equal(choice.token_ids, wanted)
        assert choice.text == wanted.text and choice.text.strip() == to_text(choice.token_ids)
        assert choice.finish_reason == "length"
        assert whole.usage.prompt_tokens == len(prompt)
        assert whole.usage.completion_tokens == NUM_TOKENS
        for logprob, (token_id, entries) in zip(
            choice.logprobs.token_logprobs,
            zip(wanted.token_ids, wanted.logprobs or [], strict=True),
            strict=True,
        ):
            assert logprob == pytest.approx(entries[token_id].logprob, abs=1e-3)
        text, usage = "", None
        options = {"include_usage": True}
        for chunk in client.completions.create(
            model="tiny", prompt=prompt, stream=True, stream_options=options, **GREEDY
        ):
            text += "".join(choice.text for choice in chunk.choices)
            usage = chunk.usage or usage
        assert text == choice.text and usage == whole.usage


def test_chats_are_the_offline_ones_whole_and_streamed(client, llm):
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
    wanted = llm.chat(MESSAGES, params, use_tqdm=False)[0].outputs[0]
    create = client.chat.completions.create
    whole = create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY)
    choice = whole.choices[0]
    check_equal(choice.token_ids, wanted)
    assert choice.message.content == wanted.text and choice.message.role == "assistant"
    tokens = [entry.token for entry in choice.logprobs.content]
    assert "".join(tokens) == wanted.text
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    chunks = list(
        create(
            model="tiny",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(deltas) == wanted.text
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == "length"


def test_thirty_two_clients_at_once_get_what_each_gets_alone(url, llm):
    prompts = golden_prompts(32)
    wanted = offline(llm, prompts)

    async def ask(client: AsyncOpenAI, number: int) -> None:
        prompt, expected = prompts[number], wanted[number]
        if number % 2:
            whole: Any = await client.completions.create(model="tiny", prompt=prompt, **GREEDY)
            check_equal(whole.choices[0].token_ids, expected)
            return
        ids: list[int] = []
        stream: Any = await client.completions.create(
            model="tiny", prompt=prompt, stream=True, **GREEDY
        )
        async for chunk in stream:
            for choice in chunk.choices:
                ids += choice.token_ids
        assert len(ids) == NUM_TOKENS
        check_equal(ids, expected)

    async def ask_all() -> None:
        async with AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            await asyncio.gather(*(ask(client, number) for number in range(32)))

    asyncio.run(ask_all())


def test_several_prompts_and_choices_come_in_their_order(client, llm):
    prompts = golden_prompts(3)
    answer = client.completions.create(model="tiny", prompt=prompts, **GREEDY)
    for choice, wanted in zip(answer.choices, offline(llm, prompts), strict=True):
        check_equal(choice.token_ids, wanted)
    body = {"ignore_eos": True}
    arguments: dict[str, Any] = {"model": "tiny", "prompt": "w5 w6", "n": 3, "seed": 1}
    arguments |= {"max_tokens": 12, "extra_body": body}
    first = client.completions.create(**arguments)
    again = client.completions.create(**arguments)
    assert [choice.text for choice in first.choices] == [choice.text for choice in again.choices]
    assert len({choice.text for choice in first.choices}) == 3
    alone = client.completions.create(**{**arguments, "n": 1, "seed": 2})
    assert alone.choices[0].text == first.choices[1].text


def test_stop_strings_end_streams_before_them(client):
    whole = client.completions.create(model="tiny", prompt="w5 w6 w7", **GREEDY)
    words = whole.choices[0].text.split()
    stop = f"{words[5]} {words[6]}"
    kept = whole.choices[0].text.split(stop)[0]
    text, reason = "", None
    for chunk in client.completions.create(
        model="tiny", prompt="w5 w6 w7", stop=stop, stream=True, **GREEDY
    ):
        text += chunk.choices[0].text
        reason = chunk.choices[0].finish_reason or reason
    assert text == kept and reason == "stop"


def test_errors_are_the_clients_own_exceptions(client, url):
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        create(model="tiny", messages=MESSAGES, temperature=9)
    assert bad.value.param == "temperature" and bad.value.code == "400"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 128 tokens"):
        client.completions.create(model="tiny", prompt="w5 " * 200)
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="other", messages=MESSAGES)
    assert "`tiny`" in str(missing.value) and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="not supported"):
        create(model="tiny", messages=MESSAGES, response_format={"type": "json_object"})
    with pytest.raises(openai.AuthenticationError):
        OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()
    with pytest.raises(openai.APIStatusError) as large:
        client.completions.create(model="tiny", prompt="x" * (9 << 20))
    assert large.value.status_code == 413
    assert create(model="tiny", messages=MESSAGES, max_tokens=2).choices


def test_unknown_fields_are_answered_and_named_in_a_header(client):
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=MESSAGES, max_tokens=2, extra_body={"frobnicate": 1}, user="me"
    )
    assert raw.headers["x-jaxserve-ignored-fields"] == "frobnicate"
    assert raw.parse().choices[0].message.content


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["tiny", "org/tiny"]
    for name in ("tiny", "org/tiny"):
        assert client.models.retrieve(name).max_model_len == 128
        answer = client.completions.create(model=name, prompt="w5", max_tokens=1)
        assert answer.model == "tiny", "the first name is shown"


@pytest.mark.bugbank
def test_bugbank_R01_R03_a_bad_request_leaves_the_engine_as_it_was(client, url):
    for fields in (
        {"logit_bias": {"AI": -100}},
        {"logit_bias": {"100000": 5}},
        {"extra_body": {"stop_token_ids": [5000], "min_tokens": 5}},
        {"extra_body": {"stop_token_ids": [-1]}},
        {"n": 100_000},
    ):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="tiny", messages=MESSAGES, **fields)
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, **GREEDY)
    assert whole.usage.completion_tokens == NUM_TOKENS


def test_clients_that_leave_free_the_engine_for_others(url, client):
    async def leave() -> None:
        async with AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as many:
            for stream in (True, False):
                tasks = [
                    asyncio.create_task(
                        many.completions.create(
                            model="tiny", prompt="w5", max_tokens=120, n=4, stream=stream,
                            extra_body={"ignore_eos": True},
                        )
                    )
                    for _ in range(10)
                ]  # fmt: skip
                await asyncio.sleep(0.1)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(leave())
    with httpx.Client(base_url=url.removesuffix("/v1"), headers=HEADERS) as http:
        for _ in range(100):
            if json.loads(http.get("/load").content) == {"server_load": 0}:
                break
            time.sleep(0.05)
        else:
            pytest.fail("requests of clients that left still run")
    whole = client.completions.create(model="tiny", prompt="w5", **GREEDY)
    assert whole.usage.completion_tokens == NUM_TOKENS


@pytest.mark.bugbank
def test_bugbank_R20_a_stopped_engine_makes_health_bad_until_it_goes_on(served):
    server, address = served
    engine = server.wait_for_engine()

    async def stall() -> None:
        async with httpx.AsyncClient(base_url=address, headers=HEADERS, timeout=60) as http:

            async def health(status: int) -> bytes:
                async with asyncio.timeout(10):
                    while (answer := await http.get("/health")).status_code != status:
                        await asyncio.sleep(0.02)
                return answer.content

            os.kill(engine.pid, signal.SIGSTOP)
            try:
                body = {"prompt": "w5", "max_tokens": 4}
                waiting = asyncio.create_task(http.post("/v1/completions", json=body))
                assert json.loads(await health(503)) == {"status": "stalled"}
            finally:
                os.kill(engine.pid, signal.SIGCONT)
            await health(200)
            assert (await waiting).status_code == 200

    asyncio.run(stall())
