"""What only those need who develop and measure: the prefix cache and sleep; --enable-dev-routes."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxserve.errors import InvalidRequestError
from jaxserve.field_checks import refuse_given
from server.state import state_of

_SWITCHES = ("reset_running_requests", "reset_external")
_IS_SET = {"true": True, "1": True, "false": False, "0": False}


async def _reset_prefix_cache(request: Request) -> Response:
    """200 and an empty body when no prefix is known any more, as in vLLM."""
    for name in _SWITCHES:
        value = request.query_params.get(name, "false")
        if value.lower() not in _IS_SET:
            raise InvalidRequestError.for_field(name, "must be true or false", value)
        refuse_given(**{name: _IS_SET[value.lower()]})
    await state_of(request.scope).engine.reset_prefix_cache()
    return Response(status_code=200)


async def _sleep(request: Request) -> Response:
    """200 and an empty body when the memory is free: `?level=1&mode=abort`, as in vLLM."""
    text = request.query_params.get("level", "1")
    try:
        level = int(text)
    except ValueError as error:
        raise InvalidRequestError.for_field("level", "must be an integer", text) from error
    mode = request.query_params.get("mode", "abort")
    await state_of(request.scope).engine.sleep(level, mode)
    return Response(status_code=200)


async def _wake_up(request: Request) -> Response:
    """200 and an empty body when the tags are back: `?tags=weights&tags=kv_cache`, or both."""
    tags = request.query_params.getlist("tags")
    await state_of(request.scope).engine.wake_up(tags or None)
    return Response(status_code=200)


async def _is_sleeping(request: Request) -> Response:
    is_sleeping = await state_of(request.scope).engine.is_sleeping()
    return JSONResponse({"is_sleeping": is_sleeping})


async def _release_kv_cache_memory(request: Request) -> Response:
    """200 and an empty body when the cache's memory is free."""
    await state_of(request.scope).engine.release_kv_cache_memory()
    return Response(status_code=200)


routes = [
    Route("/reset_prefix_cache", _reset_prefix_cache, methods=["POST"]),
    Route("/sleep", _sleep, methods=["POST"]),
    Route("/wake_up", _wake_up, methods=["POST"]),
    Route("/is_sleeping", _is_sleeping),
    Route("/release_kv_cache_memory", _release_kv_cache_memory, methods=["POST"]),
]
