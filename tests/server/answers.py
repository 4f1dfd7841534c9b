"""What tests read out of answers: errors, and the events of streams."""

import json
from typing import Any, NoReturn

import httpx
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

USAGE = {"include_usage": True}


def error_of(response: Any, status: int, param: str | None = None) -> str:
    """The message of an error that has OpenAI's shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["code"] == status and body["error"]["param"] == param
    message = body["error"]["message"]
    assert "Traceback" not in message and "/work" not in message and ".py" not in message
    return message


def events(response: httpx.Response) -> list[str]:
    """The data of each event of a stream."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.content.decode("utf-8").split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts)
    return [part.removeprefix("data: ") for part in parts]


def refuse_constant(text: str) -> NoReturn:
    raise AssertionError(f"{text} is no JSON")


def strict(text: str | bytes) -> Any:
    return json.loads(text, parse_constant=refuse_constant)


def chunks(response: Any) -> list[dict[str, Any]]:
    """All chunks of a stream that ends as it should; each is one that OpenAI's client reads."""
    data = events(response)
    assert data[-1] == "[DONE]" and data.count("[DONE]") == 1
    made = [strict(text) for text in data[:-1]]
    for chunk in made:
        if chunk["object"].startswith("chat"):
            ChatCompletionChunk.model_validate(chunk)
            continue
        # OpenAI's type of completions has no null reason, which its own streams send.
        choices = [{**c, "finish_reason": c["finish_reason"] or "stop"} for c in chunk["choices"]]
        Completion.model_validate({**chunk, "choices": choices})
    assert len({chunk["id"] for chunk in made}) == 1
    assert len({chunk["created"] for chunk in made}) == 1
    return made


def texts(made: list[dict[str, Any]]) -> dict[int, str]:
    """The joined text of each choice."""
    joined: dict[int, str] = {}
    for chunk in made:
        for choice in chunk["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            joined[choice["index"]] = joined.get(choice["index"], "") + text
    return joined


def reasons(made: list[dict[str, Any]]) -> list[str]:
    found = [choice["finish_reason"] for chunk in made for choice in chunk["choices"]]
    return [reason for reason in found if reason is not None]
