"""Tests of server/cli/main.py, with commands that run no engine."""

import argparse
import importlib
import subprocess
import sys
from types import SimpleNamespace

import pytest

from jaxserve import __version__
from jaxserve.errors import EngineConfigError
from server.cli import main as main_module
from server.cli.failures import CommandError
from server.cli.main import COMMANDS, command_parser, main


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):
    """A command `try` that does what the test puts into `.run`."""
    fake = SimpleNamespace(USAGE="", COMMON=(), add_arguments=lambda parser: None)
    fake.run = lambda arguments: 0
    monkeypatch.setitem(main_module.COMMANDS, "try", "try it")
    monkeypatch.setitem(sys.modules, "server.cli.try", fake)
    return fake


def raiser(error: BaseException):
    def run(arguments: argparse.Namespace) -> int:
        raise error

    return run


def test_the_status_is_the_commands(command):
    assert main(["try"]) == 0
    command.run = lambda arguments: 7
    assert main(["try"]) == 7


def test_a_known_error_is_one_line_and_status_2(command, capsys):
    command.run = raiser(EngineConfigError("seed must be an integer; got 'x'"))
    assert main(["try"]) == 2
    assert capsys.readouterr().err == "jaxserve: seed must be an integer; got 'x'\n"


def test_ctrl_c_is_status_130_and_silent(command, capsys):
    command.run = raiser(KeyboardInterrupt())
    assert main(["try"]) == 130
    assert capsys.readouterr().err == ""


def test_an_unknown_error_keeps_its_traceback(command):
    command.run = raiser(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["try"])


def test_without_a_command_the_help_is_shown(capsys):
    assert main([]) == 2
    shown = capsys.readouterr().err
    assert all(name in shown for name in ("generate", "chat", "bench", "--version"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("serv", "got 'serv'; did you mean serve?"),
        ("x", "must be one of serve, generate, chat, complete, run-batch, plan, bench; got 'x'"),
        ("collect-env", "collect-env is not supported in this release"),
    ],
)
def test_an_unknown_command_is_one_line(name, message, capsys):
    assert main([name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jaxserve: ") and line.endswith(message)


def test_an_error_of_the_run_is_one_line_and_its_own_status(command, capsys):
    command.run = raiser(CommandError("the port is busy"))
    assert main(["try"]) == 1
    assert capsys.readouterr().err == "jaxserve: the port is busy\n"


def test_a_log_level_that_is_none_is_refused(command, capsys):
    assert main(["try", "--log-level", "loud"]) == 2
    assert (
        "log_level must be one of debug, info, warning, error; got 'loud'"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("words", [["-v"], ["--version"]])
def test_the_version_is_told(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"jaxserve {__version__}\n"


@pytest.mark.parametrize("name", list(COMMANDS))
def test_the_help_of_a_command_is_short_and_says_how_to_see_all(name, capsys):
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"usage: jaxserve {name} ") and lines[1] == ""
    assert len(lines) < 45
    assert any(f"jaxserve {name} --help=all" in line for line in lines)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_help_all_names_every_flag_and_no_unsupported_one(name, capsys):
    with pytest.raises(SystemExit) as caught:
        main([name, "--help=all"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for flag in ("--model", "--max-model-len", "--row-buckets", "--log-level", "--config"):
        assert flag in shown
    assert "--enable-lora" not in shown


@pytest.mark.parametrize(
    ("topic", "first_line"),
    [
        ("port", "--port N  port to listen at (default: 8000)"),
        ("--max_num_seqs", "--max-num-seqs N  sequences that run at the same time"),
        ("-tp", "-tp N, --tensor-parallel-size N"),
        ("memory", "memory:"),
        ("SchedulerConfig", "scheduler:"),
        ("enable-lora", "--enable-lora is not supported in this release"),
    ],
)
@pytest.mark.parametrize("form", [["--help={}"], ["--help", "{}"], ["-h", "{}"]])
def test_help_of_a_topic_is_that_topic_alone(topic, first_line, form, capsys):
    words = [word.format(topic) for word in form]
    if topic.startswith("-") and len(words) > 1:
        pytest.skip("a word with dashes is a flag of its own")
    with pytest.raises(SystemExit) as caught:
        main(["serve", *words])
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == first_line and len(lines) < 30


def test_help_of_no_topic_is_one_line_with_the_closest(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help=prot"])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--help=prot names no flag and no group; did you mean --port?" in line


def test_a_command_imports_no_other_command_and_no_jax():
    script = (
        "import sys\n"
        "from server.cli.main import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'jax', 'server.cli.chat', 'jaxserve.llm', 'starlette', 'httpx'}\n"
        "loaded = heavy & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("variable", ["VLLM_API_KEY", "JAXSERVE_API_KEY"])
def test_the_key_of_the_environment_is_the_default(variable):
    def key(name: str, *words: str):
        module = importlib.import_module(f"server.cli.{name}")
        parser = command_parser(name, module, {variable: "from-env"})
        return parser.parse_args(list(words)).api_key

    assert key("serve") == ("from-env",) and key("chat") == "from-env"
    assert key("serve", "--api-key", "mine") == ("mine",)


def test_closed_standard_streams_do_not_hurt():
    script = (
        "import sys; from server.cli.main import main; sys.exit(main(['serve', '--port', 'x']))"
    )
    shell = ["sh", "-c", f'exec {sys.executable} -c "{script}" <&- >&- 2>&-']
    assert subprocess.run(shell).returncode == 2


def test_a_closed_pipe_ends_the_command_without_a_traceback():
    script = (
        "import sys\n"
        "from types import SimpleNamespace\n"
        "from server.cli import main\n"
        "def run(arguments):\n"
        "    for _ in range(100_000): print('x' * 100)\n"
        "command = SimpleNamespace(USAGE='', COMMON=(), add_arguments=lambda p: None, run=run)\n"
        "main.COMMANDS['try'] = 'x'\n"
        "sys.modules['server.cli.try'] = command\n"
        "sys.exit(main.main(['try']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 1
