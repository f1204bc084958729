"""The routes of each environment: an application of its own, with its own document, as OpenEnv's
clients and its `openenv validate` expect.

Over HTTP each request is an episode of its own, as in OpenEnv: an episode of several turns needs
the WebSocket.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, Final

import orjson
from envserver_records.errors import EnvserverError, UsageError
from fastapi import FastAPI, Request, WebSocket
from starlette.responses import Response

from ...environment import Environment
from ...rollouts.episodes import Episodes
from .. import problems
from .models import Action, Answer, Observation, Reset, State, Step
from .rpc import INVALID_REQUEST, answer_rpc, rpc_error
from .session import Session, failure_text
from .sockets import converse

PREFIX: Final = "/openenv"
_VERSION: Final = "1.0.0"
"""Of OpenEnv's HTTP protocol."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def mount_openenv(app: FastAPI, episodes: Episodes, idle_seconds: float) -> None:
    """Adds every environment of `episodes` whose name fits into a path."""
    for name in episodes.names:
        if _NAME.fullmatch(name):
            app.mount(f"{PREFIX}/{name}", _application(episodes, name, idle_seconds))


def _application(episodes: Episodes, name: str, idle_seconds: float) -> FastAPI:
    app = FastAPI(title=name, version=_VERSION, docs_url=None, redoc_url=None)
    problems.install(app)
    app.add_exception_handler(EnvserverError, _failed)
    metadata = {
        "name": name,
        "description": _description(episodes.environment(name)),
        "version": _VERSION,
    }

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "healthy"}

    @app.get("/metadata")
    async def describe() -> dict[str, str]:
        return metadata

    @app.get("/schema")
    async def schema() -> dict[str, Any]:
        """Returns the JSON schemas of actions, observations and states."""
        return {
            "action": Action.model_json_schema(),
            "observation": Observation.model_json_schema(),
            "state": State.model_json_schema(),
        }

    @app.post("/reset")
    async def reset(wanted: Reset | None = None) -> Answer:
        """Returns the first observation of a task; the episode is not kept."""
        session = Session(episodes, name)
        try:
            return await session.reset(wanted or Reset())
        finally:
            await session.close()

    @app.post("/step")
    async def step(wanted: Step) -> Answer:
        """Plays the first turn of the task that `task_id` or `seed` names."""
        session = Session(episodes, name)
        try:
            if wanted.action.type != "list_tools":
                await session.reset(wanted)
            return await session.step(wanted.action)
        finally:
            await session.close()

    @app.get("/state")
    async def state() -> State:
        """Returns the state of an environment without an episode."""
        return State()

    @app.post("/mcp")
    async def mcp(request: Request) -> dict[str, Any]:
        try:
            return await answer_rpc(orjson.loads(await request.body()), None)
        except ValueError:
            return rpc_error(None, INVALID_REQUEST, "This is not JSON.")

    @app.websocket("/ws")
    async def sessions(websocket: WebSocket) -> None:
        await converse(websocket, Session(episodes, name), idle_seconds)

    return app


async def _failed(request: Request, error: Exception) -> Response:
    """Answers an error; what failed in an episode is not told."""
    assert isinstance(error, EnvserverError)
    if isinstance(error, UsageError):
        return await problems.on_ours(request, error)
    message = failure_text(error)
    return problems.error_answer(request.url.path, error.status, message, kind=error.kind)


def _description(environment: Environment) -> str:
    """Returns the first line of its docstring, or its name."""
    text = inspect.getdoc(type(environment)) or ""
    return text.partition("\n")[0] or environment.name
