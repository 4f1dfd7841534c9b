"""Answers of both generating routes, whole and streamed, made of scripted tokens."""

import pytest
from openai.types.chat import ChatCompletion

from jaxserve.request import Request
from tests.jaxserve.small_tokenizers import byte_level
from tests.server.answers import USAGE, chunks, events, reasons, strict, texts
from tests.server.scripted_engine import TEXT, Served, say

pytestmark = pytest.mark.asyncio


async def test_a_chat_is_answered_as_openai_does():
    async with Served(enable_prompt_tokens_details=True) as served:
        response = await served.chat()
        answer = strict(response.content)
        ChatCompletion.model_validate(answer)
        choice = answer["choices"][0]
        assert choice["message"]["content"] == TEXT and choice["message"]["role"] == "assistant"
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        usage = answer["usage"]
        num_prompt = len(served.process.added[0].request().prompt_token_ids)
        num_output = len(byte_level().encode(TEXT)) + 1
        assert usage["prompt_tokens"] == num_prompt
        assert usage["completion_tokens"] == num_output
        assert usage["total_tokens"] == num_prompt + num_output
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
        assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
        assert answer["system_fingerprint"].startswith("jaxserve-")
        answer = (await served.chat(max_completion_tokens=3)).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 3


async def test_a_streamed_chat_has_a_role_first_then_text_then_an_end_then_its_usage():
    async with Served() as served:
        made = chunks(await served.chat(stream=True, stream_options=USAGE))
        first, last, usage = made[0], made[-2], made[-1]
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert not any("role" in chunk["choices"][0]["delta"] for chunk in made[1:-1])
        assert last["choices"][0]["finish_reason"] == "stop"
        assert reasons(made) == ["stop"]
        assert texts(made) == {0: TEXT}
        whole = (await served.chat()).json()
        assert usage["usage"] == whole["usage"]
        assert all(chunk["usage"] is None for chunk in made[:-1])
        made = chunks(await served.chat(stream=True))
        assert all("usage" not in chunk for chunk in made)


@pytest.mark.bugbank
@pytest.mark.parametrize("n", [1, 3])
async def test_bugbank_R29_the_usage_chunk_has_an_empty_list_of_choices(n):
    async with Served() as served:
        for ask in (served.chat, served.complete):
            made = chunks(await ask(stream=True, stream_options=USAGE, n=n))
            assert made[-1]["choices"] == [] and made[-1]["usage"]["completion_tokens"] > 0
            assert sum(bool(chunk["usage"]) for chunk in made) == 1
            assert all(chunk["choices"] for chunk in made[:-1])


async def test_running_usage_comes_with_each_chunk_and_never_falls():
    async with Served() as served:
        for ask in (served.chat, served.complete):
            options = {**USAGE, "continuous_usage_stats": True}
            made = chunks(await ask(stream=True, stream_options=options, max_tokens=9))
            counts = [chunk["usage"]["completion_tokens"] for chunk in made]
            assert counts == sorted(counts) and counts[-1] == 9 and counts[0] == 1


async def test_usage_can_be_forced_by_the_server():
    async with Served(enable_force_include_usage=True) as served:
        for ask in (served.chat, served.complete):
            assert chunks(await ask(stream=True, max_tokens=2))[-1]["usage"]["total_tokens"] > 2


async def test_choices_and_prompts_have_their_indexes():
    def script(request: Request) -> str:
        return f"p{len(request.prompt_token_ids)}"

    async with Served(say(script)) as served:
        prompts = ["x", "xx", "xxx"]
        answer = (await served.complete(prompts, n=2)).json()
        assert [c["index"] for c in answer["choices"]] == list(range(6))
        assert [c["text"] for c in answer["choices"]] == ["p1", "p1", "p2", "p2", "p3", "p3"]
        assert answer["usage"]["prompt_tokens"] == 6
        assert answer["usage"]["completion_tokens"] == 18
        made = chunks(await served.complete(prompts, n=2, stream=True, stream_options=USAGE))
        assert texts(made) == {c["index"]: c["text"] for c in answer["choices"]}
        assert made[-1]["usage"] == answer["usage"]
        assert len(reasons(made)) == 6
        made = chunks(await served.chat(n=3, stream=True))
        assert set(texts(made)) == {0, 1, 2} and len(reasons(made)) == 3


async def test_echo_repeats_the_prompt_text_or_ids():
    async with Served() as served:
        ids = byte_level().encode("né")
        for prompt in ("né", ids, ["né", "né"], [ids, ids]):
            answer = (await served.complete(prompt, echo=True, max_tokens=2)).json()
            assert {choice["text"] for choice in answer["choices"]} == {"néTh"}
            made = chunks(await served.complete(prompt, echo=True, max_tokens=2, stream=True))
            assert set(texts(made).values()) == {"néTh"}


async def test_logprobs_of_chats_show_token_bytes_and_the_most_likely():
    async with Served(say("é")) as served:
        for stream in (False, True):
            response = await served.chat(logprobs=True, top_logprobs=2, stream=stream)
            parts = [response.json()] if not stream else chunks(response)
            content = [
                entry
                for part in parts
                for choice in part["choices"]
                if choice["logprobs"]
                for entry in choice["logprobs"]["content"]
            ]
            assert len(content) == 2
            first = content[0]
            assert (first["token"], first["logprob"]) == ("é", -0.5)
            assert first["bytes"] == list("é".encode())
            assert [(t["token"], t["logprob"]) for t in first["top_logprobs"]] == [
                ("b", -0.25),
                ("é", -0.5),
            ]
        answer = (await served.chat(logprobs=True)).json()
        assert answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
        assert (await served.chat()).json()["choices"][0]["logprobs"] is None


async def test_logprobs_of_completions_are_lists_with_offsets():
    async with Served(say("ab é")) as served:
        answer = (await served.complete(logprobs=1)).json()
        logprobs = answer["choices"][0]["logprobs"]
        assert "".join(logprobs["tokens"][:-1]) == "ab é"
        lengths = list(map(len, logprobs["tokens"]))
        assert logprobs["text_offset"] == [sum(lengths[:i]) for i in range(len(lengths))]
        assert set(logprobs["token_logprobs"]) == {-0.5}
        assert logprobs["top_logprobs"][0] == {"ab": -0.5, "b": -0.25}
        made = chunks(await served.complete(logprobs=1, stream=True))
        parts = [c["logprobs"] for chunk in made for c in chunk["choices"] if c["logprobs"]]
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            assert [value for part in parts for value in part[name]] == logprobs[name]


async def test_tokens_can_be_shown_as_ids_by_request_or_setting():
    async with Served(say("a"), return_tokens_as_token_ids=True) as served:
        answer = (await served.complete(logprobs=0)).json()
        assert all(t.startswith("token_id:") for t in answer["choices"][0]["logprobs"]["tokens"])
        answer = (await served.complete(logprobs=0, return_tokens_as_token_ids=False)).json()
        assert answer["choices"][0]["logprobs"]["tokens"][0] == "a"


async def test_ids_and_the_prompts_text_are_told_when_asked_for():
    async with Served(say("ab")) as served:
        ids = [*byte_level().encode("ab"), byte_level().eos_token_ids[0]]
        whole = (await served.chat(return_token_ids=True, return_prompt_text=True)).json()
        assert whole["choices"][0]["token_ids"] == ids
        assert whole["prompt_token_ids"] == list(served.process.added[0].request().prompt_token_ids)
        assert whole["prompt_text"].startswith("<|im_start|>user\nhi")
        made = chunks(await served.chat(return_token_ids=True, stream=True))
        assert made[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        parts = [c.get("token_ids", []) for chunk in made for c in chunk["choices"]]
        assert [token_id for part in parts for token_id in part] == ids
        whole = (await served.complete(return_token_ids=True)).json()["choices"][0]
        assert whole["token_ids"] == ids
        assert whole["prompt_token_ids"] == byte_level().encode("hi")
        assert "token_ids" not in (await served.complete()).json()["choices"][0]


@pytest.mark.bugbank
async def test_bugbank_R41_no_answer_holds_what_json_does_not_have():
    for logprob in (float("-inf"), float("nan")):
        async with Served(say("ab", logprob=logprob)) as served:
            for ask, fields in (
                (served.chat, {"logprobs": True, "top_logprobs": 20}),
                (served.complete, {"logprobs": 20}),
            ):
                text = (await ask(**fields)).text
                strict(text)
                assert "-9999.0" in text and "null" not in text.split("logprobs")[1][:60]
                assert any("-9999.0" in data for data in events(await ask(stream=True, **fields)))
