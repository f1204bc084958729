"""Who sent a request that a follower passes on: one header, which only servers of the store know.

In at the leader: requests. Out: passed ones with the address and the scheme that the follower saw.
What holds: the header counts only with the leader's id, which only those know who read the store;
any other one is removed. So quotas, refused tokens and logs are about the client, and a client
cannot say that it is somebody else.
"""

from __future__ import annotations

import hmac
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

PASSED: Final = b"x-envserver-passed-on"
_SCHEMES: Final = {"http": "ws", "https": "wss"}


def is_passed(scope: Scope) -> bool:
    """Returns whether a follower sent this request: it is not passed on a second time."""
    return any(name == PASSED for name, _ in scope["headers"])


def origin_of(scope: Scope, owner: str) -> bytes:
    """Returns the header's value for the leader `owner`."""
    host, port = scope.get("client") or ("", 0)
    scheme = "https" if scope.get("scheme") in ("https", "wss") else "http"
    return f"{owner};{scheme};{port};{host}".encode("latin-1", "replace")


class FromFollowers:
    """The leader's outermost middleware.

    Args:
        owner: the leader's id.
    """

    def __init__(self, app: ASGIApp, owner: str) -> None:
        self._app = app
        self._owner = owner.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and is_passed(scope):
            values = [value for name, value in scope["headers"] if name == PASSED]
            headers = [(name, value) for name, value in scope["headers"] if name != PASSED]
            # The scope itself changes: the server reads from it after the request.
            scope["headers"] = headers
            self._restore(scope, values)
        await self._app(scope, receive, send)

    def _restore(self, scope: Scope, values: list[bytes]) -> None:
        owner, _, rest = values[0].partition(b";")
        if len(values) != 1 or not hmac.compare_digest(owner, self._owner):
            return
        scheme, port, host = rest.decode("latin-1").split(";", 2)
        scope["client"] = (host, int(port))
        scope["scheme"] = _SCHEMES[scheme] if scope["type"] == "websocket" else scheme
