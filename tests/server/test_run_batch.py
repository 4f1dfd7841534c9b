"""Tests of server/cli/run_batch.py and batch_lines.py, through the command line."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.llm import LLM
from jaxserve.sampling_params import SamplingParams
from server.cli import batch_lines, run_batch
from server.cli.batch_lines import read_lines
from server.cli.main import main
from tests.tiny_llm import MODEL, SETTINGS, write_tokenizer


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    tokenizer: Path = write_tokenizer(tmp_path_factory.mktemp("words"))
    return LLM(MODEL, tokenizer=tokenizer, scheduling_policy="priority", **SETTINGS)


@pytest.fixture(autouse=True)
def own_llm(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_batch.LLM, "from_config", lambda config: llm)


def line(custom_id: Any, url: str = "/v1/completions", method: str = "POST", **body: Any) -> bytes:
    fields = {"custom_id": custom_id, "method": method, "url": url, "body": body}
    return json.dumps(fields).encode() + b"\n"


def completion(custom_id: str, prompt: Any = "w5 w6", **more: Any) -> bytes:
    return line(custom_id, prompt=prompt, max_tokens=4, temperature=0, **more)


def chat(custom_id: str, content: str, **more: Any) -> bytes:
    messages = [{"role": "user", "content": content}]
    return line(custom_id, "/v1/chat/completions", messages=messages, max_tokens=4, **more)


def batch(tmp_path: Path, content: bytes, *words: str) -> list[dict[str, Any]]:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(content)
    assert main(["run-batch", "-i", str(source), "-o", str(target), "--quiet", *words]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    return [json.loads(answer) for answer in target.read_text().splitlines()]


def test_lines_are_answered_in_their_order_as_generate_would(tmp_path, llm):
    prompts = [f"w{5 + number} w{6 + number}" for number in range(12)]
    lines = [completion(f"id-{number}", prompt) for number, prompt in enumerate(prompts)]
    answers = batch(tmp_path, b"".join(lines))
    expected = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert [answer["custom_id"] for answer in answers] == [f"id-{n}" for n in range(12)]
    for answer, output in zip(answers, expected, strict=True):
        assert answer["error"] is None and answer["response"]["status_code"] == 200
        body = answer["response"]["body"]
        assert body["choices"][0]["text"] == output.outputs[0].text
        assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}
    assert len({a["id"] for a in answers} | {a["response"]["request_id"] for a in answers}) == 24


def test_both_urls_several_sequences_and_several_prompts_stand_in_one_file(tmp_path):
    lines = [
        chat("chat", "w9", temperature=0, n=1),
        completion("two prompts", ["w5", "w6"], echo=True),
        completion("ids", [5, 6], echo=True),
        chat("two sequences", "w9", n=2, temperature=1, seed=3, logprobs=True, top_logprobs=2),
    ]
    one, two, ids, sequences = (a["response"]["body"] for a in batch(tmp_path, b"".join(lines)))
    assert one["object"] == "chat.completion" and one["choices"][0]["message"]["content"]
    assert [choice["index"] for choice in two["choices"]] == [0, 1]
    assert [choice["text"].split()[0] for choice in two["choices"]] == ["w5", "w6"]
    assert ids["choices"][0]["text"].startswith("w5 w6 ")
    assert len(sequences["choices"]) == 2
    assert len(sequences["choices"][0]["logprobs"]["content"]) == 4


BAD = [
    (b"{\n", None, 400, "body must be JSON"),
    (b"[1]\n", None, 400, "body must be a JSON object"),
    (b'{"a": "\xff"}\n', None, 400, "UTF-8"),
    (line(None, prompt="w5"), None, 400, "custom_id must be a text"),
    (line(7, prompt="w5"), None, 400, "custom_id must be a text"),
    (line("a", method="GET", prompt="w5"), "a", 400, "method must be POST"),
    (line("a", "/v1/embeddings", input="x"), "a", 400, "url must be one of /v1/chat/completions"),
    (b'{"custom_id": "a", "method": "POST", "url": "/v1/completions"}', "a", 400, "body must be"),
    (completion("a").replace(b'"max_tokens": 4', b'"max_tokens": "x"'), "a", 400, "max_tokens"),
    (completion("a", ""), "a", 400, "prompt must give at least one token"),
    (completion("a", "w5 " * 200), "a", 400, "maximum context length"),
    (completion("a", model="other"), "a", 404, "The model `other` does not exist"),
    (completion("a", stream=True), "a", 400, "stream must not be set in a batch"),
    (completion("a", use_beam_search=True), "a", 400, "use_beam_search must not be set in a"),
    (completion("a", frequency_penalty=9), "a", 400, "frequency_penalty"),
    (chat("a", "w5", tool_choice="required"), "a", 400, "tool_choice"),
]


@pytest.mark.parametrize("newline", [b"\n", b""])
def test_a_bad_line_gets_its_error_and_ends_nothing(tmp_path, newline):
    content = completion("first") + b"\n  \n"
    content += b"\n".join(bad.strip() for bad, *_ in BAD) + b"\n" + completion("last")
    first, *failed, last = batch(tmp_path, content.rstrip() + newline)
    assert (first["custom_id"], last["custom_id"]) == ("first", "last")
    assert first["response"]["body"]["choices"] == last["response"]["body"]["choices"]
    for answer, (_, custom_id, status, message) in zip(failed, BAD, strict=True):
        assert answer["custom_id"] == custom_id and message in answer["error"]["message"]
        assert answer["response"]["status_code"] == answer["error"]["code"] == status
        assert answer["response"]["body"] == {"error": answer["error"]}


def test_names_of_the_model_are_those_it_is_served_under(tmp_path):
    lines = [completion("a", model="x"), completion("b", model="y"), completion("c", model=MODEL)]
    words = ["--model", MODEL, "--served-model-name", "x", "y"]
    answers = batch(tmp_path, b"".join(lines), *words)
    assert [answer["response"]["status_code"] for answer in answers] == [200, 200, 404]
    assert answers[1]["response"]["body"]["model"] == "x"
    assert run_batch._model_names(EngineConfig()) == ("SmolLM2-135M-Instruct",)  # as a server's


def test_many_lines_pass_through_windows(tmp_path, monkeypatch):
    monkeypatch.setattr(run_batch, "WINDOW", 3)
    answers = batch(tmp_path, b"".join(completion(f"{n}") for n in range(8)))
    assert [answer["custom_id"] for answer in answers] == list("01234567")
    assert len({answer["response"]["body"]["choices"][0]["text"] for answer in answers}) == 1


def test_an_empty_file_gives_an_empty_file(tmp_path):
    assert batch(tmp_path, b"\n") == []


def test_a_line_of_too_many_bytes_is_one_bad_line(monkeypatch, tmp_path):
    monkeypatch.setattr(batch_lines, "MAX_LINE_BYTES", 200)
    long = completion("long", "w5 " * 1000)
    bad, good = batch(tmp_path, long + completion("g"))
    assert "a line must have at most 200 bytes" in bad["error"]["message"]
    assert good["custom_id"] == "g" and good["error"] is None
    assert len(list(read_lines(io.BytesIO(long * 3 + b"x" * 201 + b"\n" + b"y")))) == 5


def test_stdin_and_stdout_are_files_too(monkeypatch, capsysbinary):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(completion("a"))))
    assert main(["run-batch", "-i", "-", "-o", "-", "--quiet"]) == 0
    (answer,) = capsysbinary.readouterr().out.splitlines()
    assert json.loads(answer)["custom_id"] == "a"


def test_what_fails_leaves_the_old_output_and_no_other_file(tmp_path, monkeypatch):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(completion("a"))
    target.write_text("old")
    words = ["run-batch", "-i", str(source), "-o", str(target)]

    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_batch, "_answer_window", fail)
    assert main(words) == 130
    assert target.read_text() == "old" and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["-i", "/no/such", "-o", "-"], 2, "-i must be a file that can be read; got '/no/such'"),
        (["-i", "/dev/null", "-o", "/no/such/x"], 2, "-o must be a file that can be written"),
        (["-i", "/dev/null"], 2, "-i and -o must be given"),
        (["-i", "IN", "-o", "/dev/full"], 1, "'/dev/full' cannot be written: No space left"),
    ],
)
def test_files_that_cannot_be_used_are_one_line(words, status, message, capsys, tmp_path):
    (tmp_path / "in").write_bytes(completion("a"))
    words = [str(tmp_path / "in") if word == "IN" else word for word in words]
    assert main(["run-batch", "--quiet", *words]) == status
    (told,) = [text for text in capsys.readouterr().err.splitlines() if "jaxserve: " in text]
    assert message in told


def test_two_dashes_in_front_are_vllms_names_too(tmp_path):
    (tmp_path / "in").write_bytes(completion("a"))
    words = ["--input-file", str(tmp_path / "in"), "--output_file", str(tmp_path / "out")]
    assert main(["run-batch", "--quiet", *words]) == 0
    assert json.loads((tmp_path / "out").read_text())["custom_id"] == "a"


def test_what_a_body_asks_of_the_engine_reaches_it_and_a_deadline_that_passes_is_told(
    tmp_path, llm, monkeypatch
):
    seen: list[Any] = []
    run = llm.run

    def late(submissions, *, use_tqdm):
        """As an engine whose first request has waited longer than it may."""
        seen.extend(request for request, _ in submissions)
        outputs = run(submissions, use_tqdm=use_tqdm)
        for part in outputs[0].outputs:
            part.finish_reason, part.text, part.token_ids = "timeout", "", []
        outputs[0].metrics.scheduled_ts = None
        return outputs

    monkeypatch.setattr(llm, "run", late)
    asked = {"cache_salt": "s", "priority": 4, "timeout": 600}
    lines = completion("late", **asked) + chat("good", "w9", **asked) + completion("bad", timeout=0)
    lines += completion("aim", ttft_goal_ms=5)
    answers = batch(tmp_path, lines)
    for request in seen:
        assert (request.cache_salt, request.priority) == ("s", 4)
        assert request.timeout_seconds == 600.0
    assert [answer["response"]["status_code"] for answer in answers] == [503, 200, 400, 400]
    assert "must run before its timeout" in answers[0]["error"]["message"]
    assert [a["error"]["param"] for a in answers[2:]] == ["timeout", "ttft_goal_ms"]
