"""Door: the first ASGI layer that a request meets; what it does not let in costs nothing more."""

import re
import uuid

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.errors import JaxServeError
from server.access.keys import ApiKeys
from server.access.limits import check_headers
from server.errors import DrainingError, error_response, has_body
from server.routes.status import OPEN_PATHS
from server.state import REQUEST_ID_KEY, ServerState

_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


class Door:
    """Checks size of headers, key and whether the server is about to leave; names requests.

    Every path needs a key but those of OPEN_PATHS, spelled exactly so, and /metrics by a setting.

    Args:
      app: what answers those who are let in.
      state: of the server.
    """

    def __init__(self, app: ASGIApp, state: ServerState):
        self._app, self._state = app, state
        self._keys = ApiKeys(state.config.api_key)
        self._without_key = OPEN_PATHS
        if state.config.allow_metrics_without_api_key:
            self._without_key |= {"/metrics"}
        self._tells_id = state.config.enable_request_id_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _client_id(scope)
        if request_id is not None:
            scope[REQUEST_ID_KEY] = request_id
        if self._tells_id:
            send = _telling(send, request_id or uuid.uuid4().hex)
        try:
            self._check(scope)
        except JaxServeError as error:
            response = error_response(error)
            if has_body(scope):
                response.headers["connection"] = "close"
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        path = get_route_path(scope)  # what the router goes by; another reading could differ
        check_headers(scope["headers"], self._state.config.max_header_bytes)
        if path not in self._without_key:
            self._keys.check(scope["headers"])
        if self._state.is_draining and path not in OPEN_PATHS | {"/metrics"}:
            raise DrainingError("the server is about to leave; ask another, or ask again later")


def _client_id(scope: Scope) -> str | None:
    """The X-Request-Id of a client, if it is one that can stand in a header again."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value.decode()
    return None


def _telling(send: Send, request_id: str) -> Send:
    async def tell(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            message = {**message, "headers": headers}
        await send(message)

    return tell
