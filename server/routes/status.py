"""GET /health, /ping, /version and /load: how the server is, for those who watch it."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import jaxserve
from jaxserve.async_llm_engine import EngineState
from server.state import state_of


async def _show_health(request: Request) -> Response:
    """200 when requests are answered, else 503 and how far the start is."""
    state = state_of(request.scope)
    if state.is_healthy:
        return Response(status_code=200)
    body: dict[str, Any] = {"status": state.status}
    if state.engine.state is EngineState.STARTING:
        stage, done, total = state.engine.progress
        body |= {"stage": stage, "done": done, "total": total}
    return JSONResponse(body, 503)


async def _show_version(request: Request) -> Response:
    return JSONResponse({"version": jaxserve.__version__})


async def _show_load(request: Request) -> Response:
    return JSONResponse({"server_load": state_of(request.scope).queue.num_requests})


routes = [
    Route("/health", _show_health),
    Route("/ping", _show_health, methods=["GET", "POST"]),
    Route("/version", _show_version),
    Route("/load", _show_load),
]
OPEN_PATHS = frozenset(("/health", "/ping", "/version"))
"""What is answered without a key, and by a server that is about to leave."""
