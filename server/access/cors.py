"""Cors: which web pages may use the server; refusals have the form of all other errors."""

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from jaxserve.errors import InvalidRequestError
from server.errors import error_json


class Cors(CORSMiddleware):
    """Answers browsers that ask before they send, and marks answers for pages that may read."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """See Starlette."""
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        kept = ("content-length", "content-type")
        headers = {name: value for name, value in response.headers.items() if name not in kept}
        refused = bytes(response.body).decode().removeprefix("Disallowed CORS ")
        error = InvalidRequestError(f"{refused} must be one that this server allows to web pages")
        return Response(error_json(error), 400, headers, media_type="application/json")
