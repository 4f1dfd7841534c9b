"""Tests of server/cli/complete.py with a model in this process."""

import io
from pathlib import Path

import pytest

from jaxserve.llm import LLM
from server.cli import talking
from server.cli.main import main
from tests.tiny_llm import MODEL, SETTINGS, write_tokenizer


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    tokenizer: Path = write_tokenizer(tmp_path_factory.mktemp("words"))
    return LLM(MODEL, tokenizer=tokenizer, **SETTINGS)


@pytest.fixture(autouse=True)
def own_llm(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(talking.LLM, "from_config", lambda config: llm)


def test_a_text_is_continued_and_the_speed_told(capsys):
    words = ["-q", "w5 w6", "--temperature", "0", "--max-tokens", "3", "--stats"]
    assert main(["complete", *words]) == 0
    shown = capsys.readouterr()
    assert len(shown.out.split()) == 3 and shown.err.startswith("3 tokens in ")


def test_a_pipe_gives_one_answer_a_line_and_texts_do_not_grow(capsys, monkeypatch):
    data = io.TextIOWrapper(io.BytesIO(b"w5\n\nw5\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", data)
    assert main(["complete", "--temperature", "0", "--max-tokens", "3"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second and len(first.split()) == 3


def test_a_text_that_is_refused_is_one_line(capsys):
    assert main(["complete", "-q", "w5 " * 200]) == 2
    assert "jaxserve: This model's maximum context length" in capsys.readouterr().err
