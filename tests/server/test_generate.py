"""Tests of server/cli/generate.py, through the command line."""

from pathlib import Path

import pytest

from server.cli.main import main
from tests.tiny_llm import GOLDEN, MODEL, flags, to_text, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("words"))


def test_prompts_and_their_continuations_go_to_stdout_and_the_speed_to_stderr(tokenizer, capsys):
    prompt = to_text([5, 6, 7])
    assert main(["generate", prompt, "w8", "--max_tokens", "3", *flags(tokenizer)]) == 0
    shown = capsys.readouterr()
    first, second = shown.out.splitlines()
    assert first.startswith(f"{prompt} ") and len(first.split()) == 6
    assert second.startswith("w8 ") and len(second.split()) == 4
    last = shown.err.replace("\r", "\n").splitlines()[-1]
    assert last.startswith("6 tokens in ") and "tokens/s) on cpu; ready after" in last


def test_nothing_is_generated_when_one_prompt_is_refused(tokenizer, capsys):
    assert main(["generate", "w5", "", *flags(tokenizer)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.endswith("jaxserve: prompt must give at least one token; got ''\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["w5", "--max-tokens", "0"], "max_tokens must be at least 1; got 0"),
        (["w5", "--block-size", "17"], "block_size must be 16, 32, 64 or 128; got 17"),
        (["w5", "--model", "/no/such"], "model must be a path that exists or a hub id"),
        (["w5", "--model", MODEL], "tokenizer.json: the file is missing"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_compiled(words, message, capsys, monkeypatch):
    monkeypatch.setattr("jaxserve.engine_builder.build_engine", None)
    assert main(["generate", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jaxserve: ") and message in line


def test_a_prompt_is_needed(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["generate"])
    assert caught.value.code == 2
    assert "required: PROMPT" in capsys.readouterr().err


def test_the_text_is_the_golden_one(tokenizer, capsys):
    prompt, tokens = GOLDEN.alone.prompt, GOLDEN.alone.tokens
    assert main(["generate", to_text(prompt), "--quiet", *flags(tokenizer)]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{to_text(prompt)} {to_text(tokens)}\n"
    assert "tokens/s" not in shown.err
