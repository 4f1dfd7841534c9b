"""POST /reset_prefix_cache: for those who develop and measure, behind --enable-dev-routes."""

from starlette.requests import Request
from starlette.responses import Response
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


routes = [Route("/reset_prefix_cache", _reset_prefix_cache, methods=["POST"])]
