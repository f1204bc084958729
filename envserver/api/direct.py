"""A fast path for posts of groups, the most frequent requests.

In: requests that passed all other middlewares. Out: the response of the route's own endpoint,
without FastAPI's routing, dependencies and parameter parsing, which cost more than reading and
storing a small group. Requests that do not clearly match take the usual route to the same
endpoint.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple

from envserver_records.errors import EnvserverError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from .problems import on_ours

Endpoint = Callable[[Request], Awaitable[Response]]

_PLAIN_QUERY: Final = re.compile(rb"(?:[a-z]+=\d{1,9}(?:&|$))*")
"""Matches queries with small integers only, which endpoints need not validate again."""


class Passed(NamedTuple):
    """Stands in for the FastAPI route when requests are counted by route."""

    path: str


class _Post(NamedTuple):
    route: Passed
    form: re.Pattern[str]
    endpoint: Endpoint


class DirectPosts:
    """The innermost middleware.

    Args:
        endpoints: POST endpoints by the path of their route; path parameters in braces become the
            request's `path_params`.
    """

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._posts = [
            _Post(Passed(path), compile_path(path)[0], endpoint)
            for path, endpoint in endpoints.items()
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            for post in self._posts:
                found = post.form.match(scope["path"])
                if found and _PLAIN_QUERY.fullmatch(scope["query_string"]):
                    scope["route"] = post.route
                    scope["path_params"] = found.groupdict()
                    await _answer(post.endpoint, scope, receive, send)
                    return
        await self._app(scope, receive, send)


async def _answer(endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope, receive)
    try:
        answer = await endpoint(request)
    except EnvserverError as error:
        answer = await on_ours(request, error)
    await answer(scope, receive, send)
