"""A stand-in for the proxy's routes for workers."""

import asyncio
import itertools
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from envserver_records.tasks import Json

from envserver.workers import Assignment
from support.serving import serving_aiohttp

ZOO = str(Path(__file__).with_name("worker_zoo.py"))


class StandIn:
    """Serves attempts that a test opens and keeps what workers post."""

    def __init__(self) -> None:
        self.results: dict[str, Json] = {}
        self.logs: list[Json] = []
        self.actions: list[Json] = []
        self.chats: list[Json] = []
        self.url = ""
        self.runner: web.AppRunner | None = None
        self._jobs: dict[str, Json] = {}
        self._numbers = itertools.count()

    def open(
        self,
        do: str,
        *,
        kind: str = "Zoo",
        file: str = ZOO,
        isolation: str = "pooled",
        seconds: float = 600.0,
        rollout_id: str = "",
        config: Json | None = None,
        **public: Any,
    ) -> Assignment:
        key = f"key-{next(self._numbers)}"
        rollout_id = rollout_id or key
        deadline = time.time() + seconds
        job = self._jobs[key] = {
            "rollout_id": rollout_id,
            "attempt": 1,
            "env": kind.lower(),
            "env_reference": f"{file}:{kind}",
            "env_config": config or {},
            "task": {"id": "only", "public": {"do": do, **public}},
            "model": "tiny",
            "deadline": deadline,
            "max_turns": 3,
        }
        return Assignment(
            rollout_id=rollout_id,
            url=f"{self.url}/r/{key}",
            env_reference=f"{file}:{kind}",
            isolation=isolation,  # type: ignore[arg-type]
            deadline=deadline,
            job=orjson.dumps(job),
            take_result=lambda result: self.results.update({key: orjson.loads(result)}),
        )

    async def also_on(self, listener: socket.socket) -> asyncio.AbstractServer:
        """Serves on another listening socket, too."""
        assert self.runner is not None
        return await asyncio.get_running_loop().create_server(self.runner.server, sock=listener)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def posted(self, assignment: Assignment) -> Json:
        return self.results[assignment.url.rpartition("/")[2]]

    def has_posted(self, assignment: Assignment) -> bool:
        return assignment.url.rpartition("/")[2] in self.results

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/r/{key}/result", self._result)
        app.router.add_post("/r/{key}/log", self._log)
        app.router.add_post("/r/{key}/actions", self._actions)
        app.router.add_post("/r/{key}/v1/chat/completions", self._chat)
        return app

    async def _result(self, request: web.Request) -> web.Response:
        self.results[request.match_info["key"]] = orjson.loads(await request.read())
        return web.Response(status=204)

    async def _log(self, request: web.Request) -> web.Response:
        self.logs.append(orjson.loads(await request.read()))
        return web.Response(status=204)

    async def _actions(self, request: web.Request) -> web.Response:
        self.actions += orjson.loads(await request.read())["steps"]
        return web.Response(status=204)

    async def _chat(self, request: web.Request) -> web.Response:
        key = request.match_info["key"]
        assert request.headers["authorization"] == f"Bearer {key}"
        self.chats.append({"headers": dict(request.headers), **await request.json()})
        public = self._jobs[key]["task"]["public"]
        if "error" in public:
            told = {"message": "no", "type": "x", "code": public["error"]}
            return web.json_response({"error": told}, status=public["status"])
        message = {"role": "assistant", "content": "hello"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "tiny"}
        return web.json_response({**answer, "choices": [choice]})


@asynccontextmanager
async def serving(kind: type[StandIn] = StandIn) -> AsyncIterator[Any]:
    standin = kind()
    async with serving_aiohttp(standin.app(), shutdown_timeout=60) as runner:
        standin.runner, standin.url = runner, runner.url
        yield standin
