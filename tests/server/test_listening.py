"""Tests of server/cli/listening.py."""

import os
import socket
from pathlib import Path

import pytest

from server.cli import listening
from server.cli.failures import CommandError
from server.cli.listening import open_listener


def refusal(host: str | None, port: int, uds: str | None = None) -> str:
    with pytest.raises(CommandError) as caught:
        open_listener(host, port, uds)
    assert caught.value.status == 1
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize(
    ("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), (None, "0.0.0.0")]
)
def test_it_listens_at_once_and_says_where(host, shown):
    listener = open_listener(host, 0, None)
    port = listener.socket.getsockname()[1]
    assert listener.address == f"http://{shown}:{port}"
    with socket.create_connection((host or "127.0.0.1", port), timeout=5):
        pass
    listener.close()


@pytest.mark.bugbank
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", None])
def test_bugbank_R85_a_busy_port_is_one_line_with_address_and_errno(host):
    first = open_listener(host, 0, None)
    port = first.socket.getsockname()[1]
    line = refusal(host, port)
    assert f":{port}: Address already in use (errno 98)" in line
    first.close()
    open_listener(host, port, None).close()


def test_a_host_that_is_not_this_machines_is_refused():
    assert "host must be a name or address of this machine; got 'no such host'" in refusal(
        "no such host", 8000
    )
    assert "cannot listen at 192.0.2.1:8000: Cannot assign" in refusal("192.0.2.1", 8000)


def test_a_resolver_that_does_not_answer_hangs_nothing(monkeypatch):
    monkeypatch.setattr(listening, "LOOKUP_SECONDS", 0.05)
    wait = __import__("threading").Event()
    monkeypatch.setattr(listening.socket, "getaddrinfo", lambda *_, **__: wait.wait(5) and [])
    assert refusal("slow.example", 8000).endswith("the lookup takes too long")
    wait.set()


def test_a_port_for_the_system_needs_its_permission(monkeypatch):
    def bind(self: socket.socket, address: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(listening.socket.socket, "bind", bind)
    line = refusal("127.0.0.1", 80)
    assert line == "cannot listen at 127.0.0.1:80: Permission denied (errno 13)"


def test_a_unix_socket_is_there_while_it_is_open(tmp_path: Path):
    path = str(tmp_path / "s")
    listener = open_listener(None, 8000, path)
    assert listener.address == f"unix:{path}"
    assert refusal(None, 8000, path).endswith("another server listens there")
    listener.close()
    assert not os.path.exists(path)


@pytest.mark.bugbank
def test_bugbank_R85_a_unix_socket_that_was_left_over_is_told(tmp_path: Path):
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    assert "a socket that nobody listens at was left there; remove it" in refusal(None, 0, path)


def test_a_path_that_cannot_be_a_socket_is_told(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    assert "a file that is no socket is there" in refusal(None, 0, str(tmp_path / "file"))
    assert "No such file or directory" in refusal(None, 0, str(tmp_path / "no" / "s"))
    assert "AF_UNIX path too long" in refusal(None, 0, "/tmp/" + "x" * 200)
