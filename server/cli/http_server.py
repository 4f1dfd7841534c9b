"""uvicorn, told to leave signals alone, to log what may be logged, and to hold the limits."""

import contextlib
import logging
from collections.abc import Collection, Iterator
from typing import Any

import uvicorn

from server.cli.http_protocol import limited_protocol
from server.config import ServerConfig

KEEP_ALIVE_SECONDS = 5
LAST_WRITES_SECONDS = 2
"""How long open connections may still be written to when a server ends."""


class HttpServer(uvicorn.Server):
    """A uvicorn server whose end is `stop`, never a signal of its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the handlers as they are."""
        yield

    @property
    def is_answering(self) -> bool:
        """Whether an application's answer to a request that has come whole is under way."""
        return len(self.server_state.tasks) > self.num_coming

    @property
    def num_coming(self) -> int:
        """Requests that have begun to come and of which more must come."""
        connections = self.server_state.connections
        return sum(getattr(connection, "is_reading_body", False) for connection in connections)

    def stop(self) -> None:
        """Take no connections any more, and return from `serve` soon."""
        self.should_exit = True


def make_http_server(app: Any, config: ServerConfig, silent_paths: Collection[str]) -> HttpServer:
    """A server of an ASGI application, for a socket that is open already.

    Args:
      app: the application.
      config: limits and what is logged.
      silent_paths: paths whose requests are not logged.
    """
    settings = uvicorn.Config(
        app,
        http=limited_protocol(config.max_header_bytes),
        ws="none",
        interface="asgi3",
        lifespan="off",
        log_config=None,
        log_level=config.uvicorn_log_level,
        access_log=not config.disable_uvicorn_access_log,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=LAST_WRITES_SECONDS,
    )
    logging.getLogger("uvicorn.access").filters = [_AccessFilter(silent_paths)]
    logging.getLogger("uvicorn.error").filters = [_LifeFilter()]
    return HttpServer(settings)


class _LifeFilter(logging.Filter):
    """Drops uvicorn's news of its own start and end: ServerLife tells those of the server."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno != logging.INFO


class _AccessFilter(logging.Filter):
    """Cuts queries, which may hold a key, off the access log's paths, and drops some paths."""

    def __init__(self, silent_paths: Collection[str]):
        super().__init__()
        self._silent_paths = frozenset(silent_paths)

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple) and len(record.args) == 5:
            client, method, path, version, status = record.args
            path = str(path).partition("?")[0]
            record.args = (client, method, path, version, status)
            return path not in self._silent_paths
        return True
