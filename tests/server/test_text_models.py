"""Tests of chat and complete against a server that follows a script."""

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from server.cli import talking
from server.cli.main import main


class Script(BaseHTTPRequestHandler):
    """Answers as the test says, and keeps what it was asked."""

    asked: list[tuple[str, str | None, Any]] = []
    status, answer, content_type = 200, b"", "text/event-stream"

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "first"}, {"id": "second"}]}).encode()
        self._send(200, body, "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((self.path, self.headers["authorization"], body))
        self._send(self.status, self.answer, self.content_type)

    def _send(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, type[Script]]]:
    """The URL of a server and its script; no model is loaded here."""
    monkeypatch.setattr(talking, "LLM", None)
    script = type("ThisScript", (Script,), {"asked": []})
    with HTTPServer(("127.0.0.1", 0), script) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}/v1", script
        http.shutdown()
        thread.join()


def events(*values: Any) -> bytes:
    shown = [f"data: {v if isinstance(v, str) else json.dumps(v)}\n\n" for v in values]
    return "".join(shown).encode()


def chat_chunk(text: str | None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text} if text else {"role": "assistant"}}]}


USAGE = {"choices": [], "usage": {"completion_tokens": 7}}


def test_a_question_goes_to_the_server_and_its_answer_is_printed(server, capsys):
    url, script = server
    script.answer = events(chat_chunk(None), chat_chunk("hel"), chat_chunk("lo"), USAGE, "[DONE]")
    words = ["--url", url, "-q", "hi", "--system-prompt", "s", "--api-key", "k", "--stats"]
    assert main(["chat", *words, "--temperature", "0", "--stop", "x"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "hello\n"
    assert shown.err.startswith("7 tokens in ") and "tokens/s), the first after" in shown.err
    ((path, key, body),) = script.asked
    assert (path, key) == ("/v1/chat/completions", "Bearer k")
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    assert body == {
        "model": "first",
        "messages": messages,
        "temperature": 0.0,
        "stop": ["x"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_text_is_continued_by_a_named_model_with_the_key_of_the_environment(
    server, capsys, monkeypatch
):
    url, script = server
    monkeypatch.setenv("VLLM_API_KEY", "env-key")
    script.answer = events({"choices": [{"text": " and so on"}]}, USAGE, "[DONE]")
    assert main(["complete", "--url", url + "/", "-q", "once", "--model-name", "second"]) == 0
    assert capsys.readouterr().out == " and so on\n"
    ((path, key, body),) = script.asked
    assert (path, key) == ("/v1/completions", "Bearer env-key")
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("second", "once", 64)


def test_the_conversation_grows_and_an_error_ends_only_its_answer(server, capsys, monkeypatch):
    url, script = server
    script.answer = events(chat_chunk("a"), "[DONE]")
    lines = iter(["one", "two", "three", None])

    def next_line(prompt: str) -> str | None:
        line = next(lines)
        script.status = 400 if line == "two" else 200
        ok = events(chat_chunk("a"), "[DONE]")
        script.answer = b'{"error": {"message": "too long\\nby far"}}' if line == "two" else ok
        return line

    monkeypatch.setattr(talking, "read_message", next_line)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["chat", "--url", url]) == 1
    shown = capsys.readouterr()
    assert shown.out == "a\na\n"
    assert shown.err == "jaxserve: the server answers 400: too long by far\n"
    roles = [[m["content"] for m in body["messages"]] for _, _, body in script.asked]
    assert roles == [["one"], ["one", "a", "two"], ["one", "a", "three"]]


@pytest.mark.parametrize(
    ("status", "answer", "message"),
    [
        (401, b'{"error": "Unauthorized"}', "the server answers 401: Unauthorized"),
        (503, b'{"error": {"message": "m", "code": 503}}', "the server answers 503: m"),
        (
            502,
            b"<html>bad\n gateway</html>",
            "the server answers 502, with what is no JSON: <html>",
        ),
        (500, b"", "the server answers 500: Internal Server Error"),
        (200, events({"error": {"message": "the engine\nhas ended"}}), "the engine has ended"),
        (200, events("{"), "the server sent what is no JSON: '{'"),
    ],
)
def test_an_error_of_the_server_is_one_line_and_status_1(server, capsys, status, answer, message):
    url, script = server
    script.status, script.answer = status, answer
    assert main(["chat", "--url", url, "-q", "hi", "--model-name", "m"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"jaxserve: {message}")


@pytest.mark.parametrize(
    ("url", "status", "message"),
    [
        ("http://127.0.0.1:1/v1", 1, "no answer from http://127.0.0.1:1/v1: Connection refused"),
        ("localhost:8000/v1", 2, "--url must begin with http:// or https://"),
        ("http://x:port/v1", 2, "--url must be a URL"),
    ],
)
def test_a_server_that_is_not_there_is_one_line(url, status, message, capsys):
    assert main(["complete", "--url", url, "-q", "hi"]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"jaxserve: {message}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--url", "http://x", "--dtype", "float16"], "--dtype is of a model in this process"),
        (["--url", "http://x", "--max-tokens", "0"], "max_tokens must be at least 1; got 0"),
        (["--model-name", "x"], "--model-name must come with --url"),
        (["--api-key", "x"], "--api-key must come with --url"),
    ],
)
@pytest.mark.parametrize("command", ["chat", "complete"])
def test_flags_that_nothing_would_read_are_refused(command, words, message, capsys):
    assert main([command, "-q", "hi", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_url_that_is_not_that_of_the_api_is_told_with_advice(server, monkeypatch, capsys):
    url, script = server
    monkeypatch.setattr(script, "do_GET", lambda self: self._send(404, b"{}", "application/json"))
    assert main(["complete", "--url", url.removesuffix("/v1"), "-q", "x"]) == 1
    assert capsys.readouterr().err.endswith("--url is most often one that ends in /v1\n")
    assert main(["complete", "--url", url, "-q", "x"]) == 1
    assert "most often" not in capsys.readouterr().err
