"""The role of a server among those that share its store, and the header with which a follower names
the sender of a request that it passes on.

The header tells the leader the address and the scheme that the follower saw, so quotas, refused
tokens and logs are about the client. It counts only with the leader's id, which only readers of
the store know; a request with another id is refused (`no_leader`). So no client can pass as
another one, and a server at a former leader's address serves no followers of another store.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from envserver_records.errors import EnvserverError
from prometheus_client.core import Metric
from starlette.types import ASGIApp, Receive, Scope, Send

from ...telemetry.numbers import gauge, single
from ..problems import answer_to

if TYPE_CHECKING:
    from ...store.leadership import Leadership

PASSED: Final = b"x-envserver-passed-on"


_SCHEMES: Final = {"http": "ws", "https": "wss"}


class NoLeader(EnvserverError):
    kind, status = "no_leader", 503


def is_passed(scope: Scope) -> bool:
    """Returns whether a follower sent this request: it is not passed on a second time."""
    return any(name == PASSED for name, _ in scope["headers"])


def origin_of(scope: Scope, owner: str) -> bytes:
    """Returns the header's value for the leader `owner`."""
    host, port = scope.get("client") or ("", 0)
    scheme = "https" if scope.get("scheme") in ("https", "wss") else "http"
    return f"{owner};{scheme};{port};{host}".encode("latin-1", "replace")


class FromFollowers:
    """The outermost middleware of a server that leads, or is alone.

    Args:
        owner: the leader's id; None: it shares no store, so nobody follows it.
    """

    def __init__(self, app: ASGIApp, owner: str | None) -> None:
        self._app = app
        self._owner = None if owner is None else owner.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and is_passed(scope):
            values = [value for name, value in scope["headers"] if name == PASSED]
            headers = [(name, value) for name, value in scope["headers"] if name != PASSED]
            # The scope itself changes: the server reads from it after the request.
            scope["headers"] = headers
            if not self._restored(scope, values):
                await _refuse(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _restored(self, scope: Scope, values: list[bytes]) -> bool:
        """Sets the client's address and scheme; returns False if the header is not for us."""
        owner, _, rest = values[0].partition(b";")
        known = self._owner is not None and hmac.compare_digest(owner, self._owner)
        if len(values) != 1 or not known:
            return False
        scheme, port, host = rest.decode("latin-1").split(";", 2)
        scope["client"] = (host, int(port))
        scope["scheme"] = _SCHEMES[scheme] if scope["type"] == "websocket" else scheme
        return True


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    error = NoLeader(
        "This server does not lead those that passed this request on.",
        hint="Send it again; the header x-envserver-passed-on is for servers that share a store.",
        retry_after_seconds=1,
    )
    answer = answer_to(scope["path"], error)
    if scope["type"] == "http":
        await answer(scope, receive, send)
        return
    await receive()  # websocket.connect
    head = {"status": answer.status_code, "headers": answer.raw_headers}
    await send({"type": "websocket.http.response.start", **head})
    await send({"type": "websocket.http.response.body", "body": bytes(answer.body)})


def role(leadership: Leadership) -> dict[str, object]:
    """Returns what `/readyz` says of this server's part."""
    if leadership.leads:
        return {"role": "leader", "leader": leadership.url}
    leader = leadership.leader
    return {"role": "follower", "leader": None if leader is None else leader.url}


async def leads_metric(leadership: Leadership) -> Iterable[Metric]:
    """Returns whether this server leads, and how many follow it."""
    words = "1 if this server leads those that share its store, 0 if it follows"
    found = [gauge("envserver_leader", words, (), single(leadership.leads))]
    if leadership.leads:
        count = single(len(leadership.followers))
        found.append(gauge("envserver_followers", "Servers that follow this one", (), count))
    return found
