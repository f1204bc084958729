"""A follower's answers: the leader's, with every body, header and stream as they were."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket
from support.commands import free_port
from support.waiting import PATIENCE
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from envserver.api.bootstrap import PASSED, FromFollowers
from envserver.api.replicas import LeaderLink, follower_app
from envserver.http.server import serve_api
from envserver.settings.server import ServerConfig
from envserver.store.leadership import Leadership, leadership
from envserver.store.writer import Leader
from envserver.telemetry.process import LoopLag

OWNER = "0123456789abcdef"
NOWHERE = "postgresql://user@127.0.0.1:1/name"


@dataclass
class Follower:
    """A server that follows whatever leader is set, and a client of it."""

    leads: Leadership
    url: str
    http: httpx.AsyncClient

    def follow(self, url: str) -> None:
        self.leads.leader = Leader(OWNER, url=url)
        self.leads.changed(OWNER)


@pytest.fixture
async def follower() -> AsyncIterator[Follower]:
    async with following(ServerConfig(port=0)) as made:
        yield made


@asynccontextmanager
async def following(settings: ServerConfig) -> AsyncIterator[Follower]:
    async with (
        leadership(NOWHERE, 5.0) as leads,
        LeaderLink(leads, settings) as link,
        LoopLag() as lag,
    ):
        app = follower_app(leads, link, settings, lag)
        async with (
            await serve_api(app, "127.0.0.1", 0, settings) as running,
            httpx.AsyncClient(base_url=running.url, timeout=PATIENCE) as http,
        ):
            yield Follower(leads, running.url, http)


async def echo(request: Request) -> Response:
    """What the leader was asked."""
    headers = {name: value for name, value in request.headers.items() if name != "host"}
    facts = {
        "method": request.method,
        "target": f"{request.scope['raw_path'].decode()}?{request.url.query}",
        "headers": headers,
        "body": (await request.body()).decode("latin-1"),
        "client": request.client.host if request.client else "",
    }
    return JSONResponse(facts, 201, {"x-envserver-lease": "abc"})


@asynccontextmanager
async def leading(*routes: Route | WebSocketRoute) -> AsyncIterator[str]:
    app = FromFollowers(Starlette(routes=list(routes)), OWNER)
    async with await serve_api(app, "127.0.0.1", 0, ServerConfig()) as running:
        yield running.url


async def test_requests_and_answers_arrive_as_they_were_sent(follower: Follower) -> None:
    async with leading(Route("/v1/{rest:path}", echo, methods=["GET", "POST", "DELETE"])) as url:
        follower.follow(url)
        answer = await follower.http.post(
            "/v1/groups/a%2Fb?x=1&y=%20", content=b"body", headers={"idempotency-key": "k"}
        )
        asked = answer.json()
        assert (answer.status_code, answer.headers["x-envserver-lease"]) == (201, "abc")
        assert asked["target"] == "/v1/groups/a%2Fb?x=1&y=%20"
        assert (asked["body"], asked["headers"]["idempotency-key"]) == ("body", "k")
        assert PASSED.decode() not in asked["headers"]
        assert asked["client"] == "127.0.0.1"

        # A body that need not be read whole is streamed.
        async def parts() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b"part"

        asked = (await follower.http.post("/v1/x", content=parts())).json()
        assert asked["body"] == "part" * 3
        assert (await follower.http.get("/v1/x")).json()["body"] == ""


async def test_streams_and_websockets_are_passed_on_as_they_come(follower: Follower) -> None:
    more = asyncio.Event()
    left = asyncio.Event()

    async def stream(request: Request) -> Response:
        async def events() -> AsyncIterator[str]:
            try:
                yield "data: first\n\n"
                await more.wait()
                yield "data: second\n\n"
                await asyncio.Event().wait()
            finally:
                left.set()

        return StreamingResponse(events(), media_type="text/event-stream")

    async def talk(websocket: WebSocket) -> None:
        await websocket.accept()
        while (said := await websocket.receive_text()) != "bye":
            await websocket.send_text(f"{said} {websocket.headers['authorization']}")
        await websocket.close(4000)

    routes = Route("/v1/events", stream), WebSocketRoute("/openenv/math/ws", talk)
    address = follower.url.replace("http", "ws") + "/openenv/math/ws"
    async with leading(*routes) as url, asyncio.timeout(PATIENCE):
        follower.follow(url)
        with pytest.raises(InvalidStatus, match="403"):  # the leader has no such route
            await connect(address.replace("math", "other/ws"))
        async with follower.http.stream("GET", "/v1/events") as live:
            lines = live.aiter_lines()
            assert await anext(lines) == "data: first"
            more.set()
            assert [await anext(lines), await anext(lines)] == ["", "data: second"]
        await left.wait()  # the leader sees the client leave
        async with connect(address, additional_headers={"authorization": "Bearer t"}) as socket:
            await socket.send("hello")
            assert await socket.recv() == "hello Bearer t"
            await socket.send("bye")
            await socket.wait_closed()
            assert socket.close_code == 4000


async def test_nobody_is_asked_without_a_leader(follower: Follower) -> None:
    async def problem(**more: dict[str, str]) -> tuple[int, str, str]:
        answer = await follower.http.get("/v1/runs", **more)
        return answer.status_code, answer.json()["type"], answer.headers["retry-after"]

    no_leader = (503, "urn:envserver:error:no_leader", "1")
    assert await problem() == no_leader
    assert (await follower.http.get("/healthz")).status_code == 200
    assert (await follower.http.get("/readyz")).json()["role"] == "follower"
    follower.follow(f"http://127.0.0.1:{free_port()}")  # nobody listens there
    assert await problem() == no_leader
    assert (await follower.http.get("/readyz")).status_code == 503
    async with leading(Route("/v1/runs", echo)) as url:
        follower.follow(url)
        # Two followers that take each other for the leader do not pass a request on for ever.
        assert await problem(headers={PASSED.decode(): "anything"}) == no_leader


Answering = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def to_raw(follower: Follower, answer: Answering) -> AsyncIterator[None]:
    """The follower takes what answers so for its leader."""
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        follower.follow(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        yield


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_a_request_the_leader_has_is_not_repeated(follower: Follower, method: str) -> None:
    asked = 0

    async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        await reader.readuntil(b"\r\n\r\n")
        asked += 1
        if asked == 1:  # a connection that is kept, and breaks when it is used again
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            asked += 1
        writer.close()

    async with to_raw(follower, dies):
        assert (await follower.http.request(method, "/batch")).status_code == 200
        answer = await follower.http.request(method, "/v1/batch")
        assert answer.json()["type"] == "urn:envserver:error:leader_gone"
        assert (answer.status_code, asked) == (502, 2)


async def test_a_leader_that_is_replaced_is_waited_for_no_longer(follower: Follower) -> None:
    came = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.set()
        await reader.read(-1)
        writer.close()

    async with to_raw(follower, silent), asyncio.timeout(PATIENCE):
        asking = asyncio.create_task(follower.http.get("/v1/status"))
        await came.wait()
        follower.leads.changed(OWNER)  # the same one: nothing changes
        follower.leads.changed("another")
        assert (await asking).status_code == 502


async def test_only_followers_say_who_asks(follower: Follower) -> None:
    async with leading(Route("/v1/who", echo)) as url, httpx.AsyncClient(timeout=PATIENCE) as http:
        named = {PASSED.decode(): f"{OWNER};http;1;10.1.2.3"}
        asked = (await http.get(f"{url}/v1/who", headers=named)).json()
        assert asked["client"] == "10.1.2.3"
        assert PASSED.decode() not in asked["headers"]
        for value in ("guess;http;1;10.1.2.3", "", ";http;1;10.1.2.3"):
            refused = await http.get(f"{url}/v1/who", headers={PASSED.decode(): value})
            assert refused.json()["type"] == "urn:envserver:error:no_leader"


async def test_another_server_at_the_address_of_a_gone_leader_is_idle(follower: Follower) -> None:
    """Another store's leader, or a server alone: nothing may be posted or leased there."""
    done = []

    async def lease(request: Request) -> Response:
        done.append(request.url.path)
        return JSONResponse({})

    async def talk(websocket: WebSocket) -> None:
        done.append(websocket.url.path)

    routes = [Route("/v1/batch", lease, methods=["POST"]), WebSocketRoute("/openenv/x/ws", talk)]
    for owner in ("f" * 16, None):
        app = FromFollowers(Starlette(routes=routes), owner)
        async with await serve_api(app, "127.0.0.1", 0, ServerConfig()) as running:
            follower.follow(running.url)
            answer = await follower.http.post("/v1/batch", json={})
            assert answer.json()["type"] == "urn:envserver:error:no_leader"
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            with pytest.raises(InvalidStatus, match="503"):
                await connect(follower.url.replace("http", "ws") + "/openenv/x/ws")
    assert not done


async def test_unknown_tokens_do_not_reach_the_leader(path: Path, tokens: dict[str, str]) -> None:
    settings = ServerConfig(port=0, tokens_file=path)
    async with following(settings) as follower, leading(Route("/v1/status", echo)) as url:
        follower.follow(url)
        for headers, status in (
            ({"authorization": f"Bearer {tokens['reader']}"}, 201),
            ({"authorization": "Bearer wrong"}, 401),
            # The leader knows who is logged in, and refuses the others.
            ({"cookie": "envserver_1234=login"}, 201),
        ):
            answer = await follower.http.get("/v1/status", headers=headers)
            assert answer.status_code == status
