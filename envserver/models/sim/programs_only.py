"""Refuses what a browser sends: any page that a user opens could ask an engine on this machine.

In: requests. Out: 403 for those that a browser marks as sent by a page. Programs send neither
`Origin` nor `Sec-Fetch-Site`; an address that the user types has `Sec-Fetch-Site: none`.
"""

from __future__ import annotations

from typing import Any, Final

import orjson
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

_MESSAGE: Final = "This engine answers programs, not pages in a browser."


class ProgramsOnly:
    """The middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and any(map(_is_of_a_page, scope["headers"])):
            error: dict[str, Any] = {"message": _MESSAGE, "type": "PermissionDenied", "code": 403}
            body = orjson.dumps({"error": error})
            answer = Response(body, 403, media_type="application/json")
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _is_of_a_page(header: tuple[bytes, bytes]) -> bool:
    name, value = header
    return name == b"origin" or (name == b"sec-fetch-site" and value != b"none")
