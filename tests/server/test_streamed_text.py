"""Streamed text: joined deltas are the whole text, and no part of a stop string is sent."""

import random
from typing import Any

import pytest

from jaxserve.request import Request
from tests.jaxserve.small_tokenizers import ALL, byte_level
from tests.server.answers import chunks, events, reasons, texts
from tests.server.scripted_engine import Served, say

pytestmark = pytest.mark.asyncio


@pytest.mark.bugbank
async def test_bugbank_R25_no_part_of_a_stop_string_is_sent():
    async with Served(say("ABCDEFGHIJKLM")) as served:
        for stop in ("DEFGHIJ", ["XY", "DEFGHIJ"], ["DEFX", "DEFGHIJ"], ["HIJ", "DEFGHI"]):
            for ask in (served.chat, served.complete):
                made = chunks(await ask(stop=stop, stream=True))
                whole = (await ask(stop=stop)).json()["choices"][0]
                text = whole["text"] if "text" in whole else whole["message"]["content"]
                assert texts(made) == {0: text} and text == "ABC"
                assert reasons(made) == ["stop"]
                wanted = stop if isinstance(stop, str) else stop[1]
                assert whole["stop_reason"] == wanted
                made = chunks(await ask(stop=stop, stream=True, include_stop_str_in_output=True))
                assert texts(made)[0] == "ABC" + wanted


@pytest.mark.bugbank
async def test_bugbank_R21_a_prompt_that_ends_inside_a_character_is_not_repeated():
    tokenizer = byte_level()
    for character in "é漢😀ñ":
        ids = tokenizer.encode("Hello world " + character)
        for cut in range(1, len(character.encode())):
            head, rest = ids[: len(ids) - cut], ids[len(ids) - cut :]
            if len(head) < len(tokenizer.encode("Hello world ")):
                continue

            def script(request: Request, rest=rest) -> list[int]:
                return [*rest, *tokenizer.encode(" ok")]

            async with Served(say(script)) as served:
                joined = texts(chunks(await served.complete(head, stream=True)))[0]
                assert "Hello" not in joined and joined.endswith(" ok") and len(joined) <= 8


@pytest.mark.bugbank
@pytest.mark.parametrize("name", ALL)
async def test_bugbank_R23_R24_streamed_text_is_the_whole_text_whatever_the_tokens(name):
    tokenizer, draw = ALL[name](), random.Random(name)
    ids = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.eos_token_ids]

    def script(request: Request) -> list[int]:
        return draw_of[request.prompt_token_ids]

    draw_of: dict[tuple[int, ...], list[int]] = {}
    async with Served(say(script, tokenizer), tokenizer=tokenizer) as served:
        for number in range(25):
            prompt = (number % 3, number // 3)
            draw_of[prompt] = draw.choices(ids, k=24)
            fields: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
            response = await served.complete(list(prompt), stream=True, **fields)
            whole = (await served.complete(list(prompt), **fields)).json()["choices"][0]["text"]
            assert texts(chunks(response)) == {0: whole}
            for data in events(response)[:-1]:
                data.encode("utf-8")
