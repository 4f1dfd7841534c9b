"""`jaxserve serve`: an engine in its own process behind an HTTP server in this one."""

import argparse
import asyncio
import dataclasses
import logging
import signal
from typing import TYPE_CHECKING

from jaxserve import __version__
from jaxserve.config import EngineConfig
from server.cli.arguments import (
    add_config_arguments,
    add_engine_arguments,
    add_model_argument,
    engine_config,
    one_model,
    option,
    read_config,
)
from server.cli.listening import Listener, open_listener
from server.cli.shown_settings import shown_settings
from server.cli.unsupported import add_unsupported_flags
from server.config import ServerConfig

if TYPE_CHECKING:
    from jaxserve.processing.front_end import FrontEnd

logger = logging.getLogger(__name__)

USAGE = "[MODEL] [OPTION ...]"
COMMON = (
    "model_tag",
    "host",
    "port",
    "api_key",
    "served_model_name",
    "dtype",
    "max_model_len",
    "gpu_memory_utilization",
    "max_num_seqs",
    "tensor_parallel_size",
    "chat_template",
    "config",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Flags of this command that neither the engine nor the HTTP application reads."""

    disable_access_log_for_endpoints: str | None = option(
        None, "paths with commas between them whose requests are not logged, as /health", "logs"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_model_argument(parser)
    add_config_arguments(parser, ServerConfig)
    add_config_arguments(parser, ServeOptions)
    add_engine_arguments(parser, without={"skip_tokenizer_init"})
    add_unsupported_flags(parser, of_server=True)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal, or until the engine ends.

    The socket is opened first: a busy port is told before minutes of loading.
    """
    arguments.model = one_model(arguments)
    config, server_config = engine_config(arguments), read_config(arguments, ServerConfig)
    options = read_config(arguments, ServeOptions)
    logger.info("jaxserve %s: %s", __version__, shown_settings(config, server_config, options))
    signal.signal(signal.SIGTERM, _leave)
    listener = open_listener(server_config.host, server_config.port, server_config.uds)
    try:
        front_end = _open_front_end(config)
        return _serve(front_end, config, server_config, options, listener)
    except _Left:
        return 0
    finally:
        listener.close()


class _Left(BaseException):
    """SIGTERM came before there was anything to drain."""


def _leave(*_: object) -> None:
    raise _Left


def _open_front_end(config: EngineConfig) -> "FrontEnd":
    from jaxserve.processing.front_end import FrontEnd

    return FrontEnd.open(config)


def _serve(
    front_end: "FrontEnd",
    config: EngineConfig,
    server_config: ServerConfig,
    options: ServeOptions,
    listener: Listener,
) -> int:
    import uvloop

    from jaxserve.async_llm_engine import AsyncLLMEngine
    from server.app import create_app
    from server.cli.http_server import make_http_server
    from server.cli.server_life import ServerLife

    async def live() -> int:
        engine = AsyncLLMEngine(config, front_end=front_end)
        app = create_app(engine, server_config)
        silent = (options.disable_access_log_for_endpoints or "").split(",")
        http = make_http_server(app, server_config, silent)
        life = ServerLife(engine, http, app.state.server, server_config.shutdown_timeout)
        return await life.run(listener)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(live())
