"""Tests of server/cli/chat.py, through the command line."""

import io
from pathlib import Path

import pytest

from jaxserve.llm import LLM
from server.cli import chat, talking
from server.cli.main import main
from tests.tiny_llm import MODEL, SETTINGS, flags, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def llm(tokenizer: Path) -> LLM:
    return LLM(MODEL, tokenizer=tokenizer, **SETTINGS)


@pytest.fixture
def prompts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """Let the command use the module's LLM; the messages of each answer."""
    seen: list[list[dict[str, str]]] = []
    stream_chat = llm.stream_chat

    def watched(messages, params):
        seen.append(list(messages))
        return stream_chat(messages, params)

    monkeypatch.setattr(talking.LLM, "from_config", lambda config: llm)
    monkeypatch.setattr(llm, "stream_chat", watched)
    return seen


def type_in(monkeypatch: pytest.MonkeyPatch, text: str | bytes) -> None:
    data = text.encode() if isinstance(text, str) else text
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


OPTIONS = ["--temperature", "0", "--max-tokens", "3"]


def test_a_quick_question_gets_one_answer_and_nothing_else(prompts, capsys):
    assert main(["chat", "-q", "w5", "--system-prompt", "w6", *OPTIONS]) == 0
    assert len(capsys.readouterr().out.split()) == 3
    system, user = {"role": "system", "content": "w6"}, {"role": "user", "content": "w5"}
    assert prompts == [[system, user]]


def test_an_answer_that_nobody_limits_may_use_the_rest_of_the_length(prompts, capsys):
    assert main(["chat", "-q", "w5", "--temperature", "0"]) == 0
    num_prompt_tokens = 3  # user w5 w9
    num_words = len(capsys.readouterr().out.split())
    assert num_words == SETTINGS["max_model_len"] - num_prompt_tokens


def test_a_pipe_gives_one_answer_a_line_and_the_conversation_grows(prompts, capsys, monkeypatch):
    type_in(monkeypatch, "w5\n\nw6")
    assert main(["chat", *OPTIONS]) == 0
    shown = capsys.readouterr()
    answers = shown.out.splitlines()
    assert len(answers) == 2 and "> " not in shown.out and "Ctrl" not in shown.err
    first, second = prompts
    assert first == [{"role": "user", "content": "w5"}]
    answer = {"role": "assistant", "content": answers[0]}
    assert second == [*first, answer, {"role": "user", "content": "w6"}]


def test_a_message_that_does_not_fit_is_taken_back_and_shows_in_the_status(
    prompts, capsys, monkeypatch
):
    type_in(monkeypatch, f"{'w5 ' * 200}\nw6\n")
    assert main(["chat", *OPTIONS]) == 2
    shown = capsys.readouterr()
    assert "jaxserve: This model's maximum context length" in shown.err
    assert len(shown.out.split()) == 3
    assert prompts[1] == [{"role": "user", "content": "w6"}]


def test_a_quick_question_that_does_not_fit_is_an_error(prompts, capsys):
    assert main(["chat", "-q", "w5 " * 200, *OPTIONS]) == 2
    assert "maximum context length" in capsys.readouterr().err


def test_input_that_is_no_text_is_an_error(prompts, capsys, monkeypatch):
    type_in(monkeypatch, b"w5 \xff\n")
    assert main(["chat", *OPTIONS]) == 2
    assert "jaxserve: messages must be UTF-8; got" in capsys.readouterr().err


def test_ctrl_c_at_a_terminal_ends_the_answer_only(prompts, capsys, monkeypatch):
    type_in(monkeypatch, "w5\nw6\n")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    lines = iter(["w5", "w6"])
    monkeypatch.setattr(talking, "read_message", lambda prompt: next(lines, None))
    answer = chat.Conversation.answer

    def interrupted(self, message: str) -> None:
        if message == "w5":
            raise KeyboardInterrupt
        answer(self, message)

    monkeypatch.setattr(chat.Conversation, "answer", interrupted)
    assert main(["chat", *OPTIONS]) == 0
    assert len(capsys.readouterr().out.split()) == 3
    assert prompts == [[{"role": "user", "content": "w6"}]]


def test_a_model_without_a_template_is_refused(llm, prompts, capsys, monkeypatch):
    monkeypatch.setattr(llm.get_tokenizer(), "chat_templates", {})
    assert main(["chat", "-q", "w5"]) == 2
    expected = "jaxserve: --chat-template must be given; the model has no chat template\n"
    assert capsys.readouterr().err == expected


def test_the_real_command_starts_an_engine_with_its_flags(tokenizer, capsys):
    template = "{{ messages[0].content }} w200"
    words = ["chat", "-q", "w5", "--chat-template", template, *OPTIONS, *flags(tokenizer)]
    assert main(words) == 0
    assert len(capsys.readouterr().out.split()) == 3
