"""ApiKeys: whether a request carries one of the server's keys."""

import hmac
from collections.abc import Iterable, Sequence

from jaxserve.errors import AuthenticationError

type Headers = Iterable[tuple[bytes, bytes]]


class ApiKeys:
    """The keys of a server, compared in a time that tells nothing of them."""

    def __init__(self, keys: Sequence[str]):
        self._keys = [key.encode() for key in keys]

    def check(self, headers: Headers) -> None:
        """Look for a key in `Authorization: Bearer ...`.

        Raises:
          AuthenticationError: keys are asked for, and there is none or a wrong one.
        """
        if not self._keys:
            return
        given = [value for name, value in headers if name == b"authorization"]
        if len(given) != 1 or given[0][:7].lower() != b"bearer ":
            raise AuthenticationError("Authorization must be Bearer with an API key")
        token = given[0][7:].strip(b" ")
        # All of them are compared, so that the time does not tell which was near.
        if not sum(hmac.compare_digest(token, key) for key in self._keys):
            raise AuthenticationError("the API key must be one of this server's")
