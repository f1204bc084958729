"""Posts of groups on a shorter way than other requests: they come most.

In: requests that passed every other middleware. Out: the answer of the route's own endpoint; only
the framework's search for the route, its dependencies and its parameters are left out, which cost
more than reading and storing a small group. What is not plainly such a post takes the usual way, to
the same endpoint.
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
"""Small numbers only: no endpoint need look at them twice."""


class Passed(NamedTuple):
    """What stands for the framework's route where requests are counted by it."""

    path: str


class _Post(NamedTuple):
    route: Passed
    form: re.Pattern[str]
    endpoint: Endpoint


class DirectPosts:
    """The innermost middleware.

    Args:
        endpoints: for POST, by path as routes have it; its parts in braces are the request's
            `path_params`.
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
