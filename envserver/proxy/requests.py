"""What every request to the proxy must have: its key, and the right method."""

from __future__ import annotations

import hmac

from envserver_records.errors import UsageError

from .asgi import Receive, Scope, Send, header


class WrongKey(UsageError):
    kind, status = "wrong_key", 401


class WrongMethod(UsageError):
    kind, status = "method_not_allowed", 405


def key_and_rest(path: str) -> tuple[str, str]:
    """Returns the attempt's key in a path, and what follows it."""
    key, _, rest = path.partition("/r/")[2].partition("/")
    return key, rest


def check_bearer(scope: Scope, key: str) -> None:
    """Checks the key in a request's headers, if it has one.
    Raises WrongKey: the client sends a key that differs from the path's.
    """
    scheme, _, token = header(scope, b"authorization").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else scheme
    for sent in (bearer, header(scope, b"x-api-key")):
        if sent and not hmac.compare_digest(sent.encode(), key.encode()):
            raise WrongKey("The key does not belong to this address.")


def require(method: str, wanted: str) -> None:
    """Raises WrongMethod: the method is not `wanted`."""
    if method != wanted:
        raise WrongMethod(f"Use {wanted} here, not {method[:20]}.")


async def answer_lifespan(receive: Receive, send: Send) -> None:
    """Answers the ASGI server's messages of start and end."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
