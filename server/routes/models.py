"""GET /v1/models and /v1/models/{id}."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from server.state import ServerState, state_of


def _card(state: ServerState, name: str) -> dict[str, Any]:
    """What clients are told of a model; where its files lie is not among it."""
    info = state.engine.info
    permission = {
        "id": f"modelperm-{state.created}",
        "object": "model_permission",
        "created": state.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "jaxserve",
        "root": state.model_names[0],
        "parent": None,
        "max_model_len": None if info is None else info.max_model_len,
        "permission": [permission],
    }


async def _list_models(request: Request) -> Response:
    state = state_of(request.scope)
    cards = [_card(state, name) for name in state.model_names]
    return JSONResponse({"object": "list", "data": cards})


async def _show_model(request: Request) -> Response:
    state, name = state_of(request.scope), request.path_params["name"]
    state.check_model(name)
    return JSONResponse(_card(state, name))


routes = [Route("/v1/models", _list_models), Route("/v1/models/{name:path}", _show_model)]
