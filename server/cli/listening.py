"""The socket that a server listens at; opened before anything slow, so mistakes show at once."""

import os
import socket
import stat
import threading
from dataclasses import dataclass
from typing import Any

from server.cli.failures import CommandError

LOOKUP_SECONDS = 1.5
BACKLOG = 2048


@dataclass(frozen=True)
class Listener:
    """A socket that listens already.

    Attributes:
      socket: of TCP, or of a path.
      address: for people, as "http://127.0.0.1:8000".
      path: of a Unix socket.
    """

    socket: socket.socket
    address: str
    path: str | None = None

    def close(self) -> None:
        """Close the socket, and remove its file."""
        self.socket.close()
        if self.path is not None:
            try:
                os.unlink(self.path)
            except FileNotFoundError:
                return


def open_listener(host: str | None, port: int, uds: str | None) -> Listener:
    """Listen at a host's port, or at the path of a Unix socket.

    Args:
      host: name or address, of IPv4 or IPv6; every address of the machine if not given.
      port: 0 takes any free one.
      uds: path; host and port are not used then.

    Raises:
      CommandError: the reason in one line; the status is 1.
    """
    return _listen_at_path(uds) if uds is not None else _listen_at_port(host, port)


def _listen_at_port(host: str | None, port: int) -> Listener:
    family, address = _look_up(host, port)
    opened = socket.socket(family, socket.SOCK_STREAM)
    shown = f"[{address[0]}]" if family == socket.AF_INET6 else address[0]
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        opened.listen(BACKLOG)
    except OSError as error:
        opened.close()
        reason = f"{error.strerror} (errno {error.errno})"
        raise CommandError(f"cannot listen at {shown}:{port}: {reason}") from error
    return Listener(opened, f"http://{shown}:{opened.getsockname()[1]}")


def _look_up(host: str | None, port: int) -> tuple[socket.AddressFamily, Any]:
    """The address of a name; a resolver that does not answer must not hang the start."""
    if host is None:
        return socket.AF_INET, ("0.0.0.0", port)
    found: list[Any] = []

    def look_up() -> None:
        try:
            found.extend(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            found.append(error)

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(LOOKUP_SECONDS)
    if not found or isinstance(found[0], Exception):
        reason = getattr(found[0], "strerror", None) if found else "the lookup takes too long"
        rule = "host must be a name or address of this machine"
        raise CommandError(f"{rule}; got {host!r}: {reason or found[0]}")
    family, _, _, _, address = found[0]
    return family, address


def _listen_at_path(path: str) -> Listener:
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        opened.bind(path)
        opened.listen(BACKLOG)
    except OSError as error:
        opened.close()
        raise CommandError(f"cannot listen at uds {path!r}: {_why_not(path, error)}") from error
    return Listener(opened, f"unix:{path}", path)


def _why_not(path: str, error: OSError) -> str:
    """The reason; a socket file that is there may be a running server's, or one left over."""
    try:
        is_socket = stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return f"{error.strerror or error} (errno {error.errno})"
    if not is_socket:
        return "a file that is no socket is there"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(LOOKUP_SECONDS)
        try:
            probe.connect(path)
        except OSError:
            return "a socket that nobody listens at was left there; remove it"
    return "another server listens there"
