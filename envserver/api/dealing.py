"""The server of a run whose groups are made elsewhere: three routes, for its runners alone.

GET  /v1/work         how groups are to be made
POST /v1/work/take    requests for groups, when there are some; says what the runner holds
POST /v1/work/made    a group, or why there is none

Every request has the token of the run.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from envserver_records.packing import pack, unpack
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ..remote.dealing import MSGPACK, WORK, Dealer, Made, Take


def dealing_app(dealer: Dealer, token: str) -> Starlette:
    """Returns the app.

    Args:
        token: what runners must know.
    """

    def only_runners(
        answer: Callable[[Request], Awaitable[Any]],
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answered(request: Request) -> Response:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                return Response("The token is not that of this run.", 401)
            try:
                return Response(pack(await answer(request)), media_type=MSGPACK)
            except msgspec.DecodeError as error:
                return Response(f"Not a message of a runner: {error}.", 422)
            except ClientDisconnect:
                return Response("The runner left before its message was whole.", 400)

        return answered

    async def rules(request: Request) -> Any:
        return dealer.rules

    async def take(request: Request) -> Any:
        return await dealer.take(unpack(await request.body(), Take))

    async def made(request: Request) -> Any:
        dealer.settle(unpack(await request.body(), Made))
        return None

    return Starlette(
        routes=[
            Route(WORK, only_runners(rules)),
            Route(f"{WORK}/take", only_runners(take), methods=["POST"]),
            Route(f"{WORK}/made", only_runners(made), methods=["POST"]),
        ]
    )
