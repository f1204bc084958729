"""Serves the built page: an ASGI middleware around any application that answers `/v1`.

In: requests. Out: the shell at `/` for a client that names `text/html`, the description of the API
at `/docs`, their files at `/ui/`; every other request goes on to the application. What holds: the
shell is the same for every source, holds no data and needs no token; it may run only scripts of
this server and talks to no other host.
"""

from __future__ import annotations

import asyncio
import functools
import gzip
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Final, NamedTuple

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

STATIC: Final = Path(__file__).with_name("static")
"""The built files: written by `make dashboard`, shipped in the wheel."""

_POLICY: Final = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data:",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'self'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
_DOCS_POLICY: Final = {
    name: value for name, value in _POLICY.items() if "trusted-types" not in name
}
"""Swagger UI sets HTML; what it shows are descriptions of our own routes."""


def _headers(policy: dict[str, str]) -> dict[str, str]:
    return {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
    }


_HEADERS: Final = _headers(_POLICY)
_DOCS_HEADERS: Final = _headers(_DOCS_POLICY)
_FILES: Final = "/ui/"
_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_SMALLEST_COMPRESSED: Final = 1000
_NOT_BUILT: Final = """<!doctype html><html lang="en"><meta charset="utf-8"><title>envserver</title>
<h1>The page is not built</h1>
<p>This is a source checkout: run <code>make dashboard</code> in it (it needs Node.js 20.19 or newer
and npm), then load this page again. Packages of envserver contain the built page.</p>
<p>The server itself works: <a href="v1/status">its status</a>.</p></html>
"""


class _File(NamedTuple):
    body: bytes
    packed: bytes
    """`body` compressed with gzip; b"" for a small one."""
    kind: str


class Dashboard:
    """Serves the page, and passes other requests to `app`."""

    def __init__(self, app: ASGIApp, static: Path = STATIC) -> None:
        self._app = app
        self._static = static

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_read = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        path: str = scope.get("path", "")
        if is_read and path == "/":
            if _wants_html(Headers(scope=scope)):
                answer = await self._page(scope, "index.html", _HEADERS)
            else:
                await self._app(scope, receive, _varying(send))
                return
        elif is_read and path == "/docs":
            answer = await self._page(scope, "docs.html", _DOCS_HEADERS)
        elif is_read and path.startswith(_FILES):
            answer = await self._asset(scope, path.removeprefix(_FILES))
        else:
            await self._app(scope, receive, send)
            return
        await answer(scope, receive, send)

    async def _page(self, scope: Scope, name: str, headers: dict[str, str]) -> Response:
        scope["route"] = SimpleNamespace(path=scope["path"])  # what requests are counted by
        file = await asyncio.to_thread(_read, self._static / name)
        if file is None:
            headers = {**headers, "cache-control": "no-store", "vary": "Accept"}
            return Response(_NOT_BUILT, 503, headers, _TYPES[".html"])
        headers = {**headers, "cache-control": "no-cache", "vary": "Accept, Accept-Encoding"}
        return _answer(scope, file, headers)

    async def _asset(self, scope: Scope, name: str) -> Response:
        scope["route"] = SimpleNamespace(path="/ui/{file}")
        path = self._static / "ui" / name
        file = await asyncio.to_thread(_read, path) if _NAME.fullmatch(name) else None
        if file is None:
            headers = {**_HEADERS, "cache-control": "no-store"}
            return PlainTextResponse("There is no such file.", 404, headers)
        # The name has a hash of the content.
        kept = {"cache-control": "public, max-age=31536000, immutable", "vary": "Accept-Encoding"}
        return _answer(scope, file, {**_HEADERS, **kept})


def _read(path: Path) -> _File | None:
    try:
        return _loaded(path, path.stat().st_mtime_ns)
    except OSError:
        return None


@functools.lru_cache(maxsize=16)
def _loaded(path: Path, changed_ns: int) -> _File:
    body = path.read_bytes()
    packed = gzip.compress(body, mtime=0) if len(body) >= _SMALLEST_COMPRESSED else b""
    return _File(body, packed, _TYPES.get(path.suffix, "application/octet-stream"))


def _answer(scope: Scope, file: _File, headers: dict[str, str]) -> Response:
    body = file.body
    if file.packed and "gzip" in Headers(scope=scope).get("accept-encoding", "").lower():
        body = file.packed
        headers = {**headers, "content-encoding": "gzip"}
    answer = Response(body, headers=headers, media_type=file.kind)
    if scope["method"] == "HEAD":
        answer.body = b""  # its length stays that of the file
    return answer


def _wants_html(headers: Headers) -> bool:
    for offer in headers.get("accept", "").lower().split(","):
        kind, *parameters = (part.strip() for part in offer.split(";"))
        if kind == "text/html":
            return not any(re.fullmatch(r"q=0(\.0*)?", parameter) for parameter in parameters)
    return False


def _varying(send: Send) -> Send:
    async def varied(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).add_vary_header("Accept")
        await send(message)

    return varied
