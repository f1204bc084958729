"""Limits what web pages, open in a browser that can reach the server, may do.

In: requests. Out: 403 for a request that would change something and that a browser sends for a
page of another origin. What holds: only pages of the server itself and of listed origins change
anything or read an answer; other pages get no CORS headers, and cannot embed an answer; browsers
keep no data. Programs other than browsers send neither `Origin` nor `Sec-Fetch-Site`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..problems import error_answer
from .rules import rules_of

_EXPOSED: Final = ("Retry-After", "X-Envserver-Lease", "X-Envserver-Reason")
_FOREIGN: Final = frozenset({b"cross-site", b"same-site"})
"""A page of the same site has another origin: another port of this machine, for example."""
_TO_BROWSERS: Final = {
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "x-content-type-options": "nosniff",
}
"""Headers of answers that do not set them themselves."""


class KnownPages:
    """Refuses changes by pages of other origins.

    Args:
        origins: origins that may use the whole API, such as `https://lab.example`.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._origins = {origin.encode("latin-1") for origin in origins}
        self._app = app
        if origins:
            self._app = CORSMiddleware(
                app,
                allow_origins=origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=_EXPOSED,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _is_change(scope) and self._is_foreign(scope):
            message = (
                "A page of another origin may not change anything here;"
                " --server.allowed_origins lists those that may."
            )
            await error_answer(scope["path"], 403, message)(scope, receive, send)
            return
        if any(name == b"sec-fetch-site" for name, _ in scope.get("headers", ())):
            send = _to_browser(send)
        await self._app(scope, receive, send)

    def _is_foreign(self, scope: Scope) -> bool:
        """Returns whether a browser sent the request for a page of an unlisted origin."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        origins = [value.lower() for name, value in headers if name == b"origin"]
        if not origins:
            return any(name == b"sec-fetch-site" and site in _FOREIGN for name, site in headers)
        hosts = [value.lower() for name, value in headers if name == b"host"]
        return any(
            origin not in self._origins and origin.partition(b"://")[2] not in hosts
            for origin in origins
        )


def _to_browser(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _TO_BROWSERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sending


def _is_change(scope: Scope) -> bool:
    if scope["type"] != "http":
        return bool(scope["type"] == "websocket")
    if scope["method"] not in ("GET", "HEAD"):
        return bool(scope["method"] != "OPTIONS")
    rule = rules_of(scope["path"]).get("GET")
    return rule is not None and rule.is_change
