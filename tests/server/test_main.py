"""Tests of server/cli/main.py, with commands that run no engine."""

import argparse
import subprocess
import sys
from types import SimpleNamespace

import pytest

from jaxserve import __version__
from jaxserve.errors import EngineConfigError
from server.cli import main as main_module
from server.cli.main import main


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):
    """A command `try` that does what the test puts into `.run`."""
    fake = SimpleNamespace(HELP="try it", USAGE="", add_arguments=lambda parser: None)
    fake.run = lambda arguments: 0
    monkeypatch.setitem(main_module.SUBCOMMANDS, "try", fake)
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


def test_an_unknown_command_is_one_line(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["serv"])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "invalid choice: 'serv'" in line


@pytest.mark.parametrize("words", [["-v"], ["--version"]])
def test_the_version_is_told(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"jaxserve {__version__}\n"


@pytest.mark.parametrize("name", ["generate", "chat", "bench"])
def test_help_of_a_command_is_short_at_the_top_and_names_every_flag(name, capsys):
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()[0]) < 80 and shown.splitlines()[1] == ""
    for flag in ("--model", "--max-model-len", "--row-buckets", "--log-level"):
        assert flag in shown


def test_a_closed_pipe_ends_the_command_without_a_traceback():
    script = (
        "import sys\n"
        "from types import SimpleNamespace\n"
        "from server.cli import main\n"
        "def run(arguments):\n"
        "    for _ in range(100_000): print('x' * 100)\n"
        "command = SimpleNamespace(HELP='x', USAGE='', add_arguments=lambda p: None, run=run)\n"
        "main.SUBCOMMANDS['try'] = command\n"
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
