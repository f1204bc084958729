"""OpenEnv: an application for each environment, with its own document, as OpenEnv's clients expect.
Over HTTP each request is an episode of its own: one of several turns needs the WebSocket."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import re
from contextlib import suppress
from typing import Any, Final, Literal

import orjson
import structlog
from envserver_records.errors import ConflictError, EnvserverError, InputError, UsageError
from envserver_records.records import Message, Split, text_of
from envserver_records.waiting import cancel_and_wait
from fastapi import FastAPI, Request, WebSocket, WebSocketDisconnect
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.responses import Response

from ..environment import Environment
from ..http.answers import answer_errors, error_answer, on_ours
from ..models.engine import Asked
from ..rollouts.episodes import Episode, Episodes, EpisodesFull
from ..rollouts.episodes import Outcome as Ended


class Reset(BaseModel):
    """Begins an episode: `reset(task_id=..., seed=..., split=..., agent=...)`."""

    task_id: str | None = None
    """A task of the environment; unset: by the seed, else the next one."""
    seed: int | None = Field(default=None, ge=0)
    """The same seed begins the same task."""
    split: Split | None = None
    """Split of the task; unset: the one that the server serves."""
    agent: str | None = None
    """The only agent to be played; unset: all that are trained."""
    episode_id: str | None = Field(default=None, max_length=255)
    """The client's name for the episode."""


class ToolCall(BaseModel):
    """One call of a tool."""

    model_config = ConfigDict(extra="forbid")

    name: str
    arguments: dict[str, Any] | str = {}
    """An object, or its JSON as the model wrote it."""
    id: str | None = None


class Action(BaseModel):
    """The model's turn: text, tool calls, or both."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["message", "call_tool", "list_tools"] = "message"
    """call_tool: one call, in `tool_name` and `arguments`. list_tools is no turn."""
    message: str = ""
    """The text of the answer."""
    tool_calls: list[ToolCall] = []
    tool_name: str = ""
    arguments: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    """Ignored."""

    @model_validator(mode="after")
    def _is_whole(self) -> Action:
        if self.type == "call_tool" and not self.tool_name:
            raise ValueError("call_tool needs a tool_name")
        return self

    def calls(self) -> list[ToolCall]:
        if self.type == "call_tool":
            return [ToolCall(name=self.tool_name, arguments=self.arguments)]
        return self.tool_calls


class Outcome(BaseModel):
    """The end of an episode."""

    rewards: dict[str, float]
    """By agent, if the environment declares agents."""
    turn_rewards: list[dict[str, Any]]
    """Rewards of single turns, which the reward includes."""
    components: dict[str, float]
    limit: str | None
    """The limit that ended the episode, such as "turns"."""


class Observation(BaseModel):
    """What the model is asked next, or the end."""

    messages: list[dict[str, Any]] = []
    """The whole conversation, in OpenAI's format; empty at the end."""
    text: str = ""
    """The text of the messages since the last turn."""
    available_tools: list[dict[str, Any]] = []
    """The tools that the model may call, in OpenAI's format."""
    agent: str | None = None
    """Whose turn it is, if the environment declares agents."""
    outcome: Outcome | None = None
    tool_name: str | None = None
    """After call_tool: the tool; `result` and `error`: what it returned."""
    result: Any = None
    error: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    """After list_tools: name, description and input_schema of each tool."""


class State(BaseModel):
    episode_id: str | None = None
    step_count: int = 0
    task_id: str | None = None
    done: bool = False


class Answer(BaseModel):
    """The answer to a reset or a step."""

    observation: dict[str, Any]
    reward: float | None = None
    """At the end of the episode, its whole reward; null before."""
    done: bool = False
    metadata: dict[str, Any] | None = None


class Step(Reset):
    """A step over HTTP: an episode of one turn, so it names its task as a reset does."""

    action: Action


_MCP_FIELDS: Final = {"tool_name", "result", "error", "tools"}
"""Fields that only answers to `call_tool` and `list_tools` have."""


class Session:
    """A session with the environment `name`; `close` frees everything."""

    def __init__(self, episodes: Episodes, name: str) -> None:
        self._episodes = episodes
        self._name = name
        self._episode: Episode | None = None
        self._asked: Asked | None = None
        self._episode_id: str | None = None
        self._steps = 0
        self._call_numbers = itertools.count(1)

    async def reset(self, wanted: Reset) -> Answer:
        await self.close()
        self._episode = await self._episodes.begin(
            self._name,
            task_id=wanted.task_id,
            seed=wanted.seed,
            split=wanted.split,
            agent=wanted.agent,
        )
        self._episode_id = wanted.episode_id or self._episode.id
        self._steps = 0
        return await self._next(self._episode)

    async def step(self, action: Action) -> Answer:
        if action.type == "list_tools":
            return await self._list_tools()
        episode, question = self._current()
        episode.answer(self._message(action))
        self._steps += 1
        answer = await self._next(episode, seen=len(question.messages))
        if action.type == "call_tool":
            text = answer.observation["text"]
            answer.observation |= {"tool_name": action.tool_name, "result": text, "error": None}
        return answer

    def state(self) -> State:
        episode = self._episode
        if episode is None:
            return State()
        return State(
            episode_id=self._episode_id,
            step_count=self._steps,
            task_id=episode.task_id,
            done=self._asked is None,
        )

    async def close(self) -> None:
        episode, self._episode, self._asked = self._episode, None, None
        if episode is not None:
            await episode.close()

    def _current(self) -> tuple[Episode, Asked]:
        if self._episode is None:
            raise ConflictError("There is no episode yet: send reset first.")
        if self._asked is None:
            raise ConflictError("The episode is over: send reset for another.")
        return self._episode, self._asked

    async def _list_tools(self) -> Answer:
        if self._episode is None:
            await self.reset(Reset())
        tools = [_as_mcp(tool) for tool in (self._asked.tools if self._asked else [])]
        return self._answer(Observation(tools=tools), done=self._asked is None)

    async def _next(self, episode: Episode, *, seen: int = 0) -> Answer:
        self._asked = None
        found = await episode.next()
        if isinstance(found, Ended):
            ended = Observation(
                outcome=Outcome(
                    rewards=found.rewards,
                    turn_rewards=[
                        {"agent": turn.agent, "call": turn.call, "value": turn.value}
                        for turn in found.turns
                    ],
                    components=found.components,
                    limit=found.limit,
                )
            )
            return self._answer(ended, reward=found.reward, done=True)
        self._asked = found
        observation = Observation(
            messages=found.messages,
            text=_newest(found.messages, seen),
            available_tools=found.tools,
            agent=found.agent,
        )
        return self._answer(observation)

    def _answer(
        self, observation: Observation, *, reward: float | None = None, done: bool = False
    ) -> Answer:
        episode = self._episode
        return Answer(
            observation=observation.model_dump(exclude=_MCP_FIELDS - observation.model_fields_set),
            reward=reward,
            done=done,
            metadata={
                "episode_id": self._episode_id,
                "task_id": None if episode is None else episode.task_id,
            },
        )

    def _message(self, action: Action) -> Message:
        calls = []
        for call in action.calls():
            arguments = call.arguments
            if not isinstance(arguments, str):
                try:
                    arguments = orjson.dumps(arguments).decode()
                except TypeError as error:
                    raise InputError(f"The arguments of {call.name[:80]!r}: {error}.") from None
            calls.append(
                {
                    "id": call.id or f"call_{next(self._call_numbers)}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": arguments},
                }
            )
        return {"role": "assistant", "content": action.message, "tool_calls": calls}


def failure_text(error: EnvserverError) -> str:
    """Returns what a client learns of an episode that failed, and logs the rest: what a scorer
    raised may name the hidden answer."""
    _log.warning("episode_failed", kind=error.kind, error=str(error))
    return f"The episode failed through no fault of the model: {error.kind}."


def _newest(messages: list[Message], seen: int) -> str:
    """Returns the text of the messages after the last turn, or of all at the beginning."""
    if seen and len(messages) > seen:
        messages = [message for message in messages[seen:] if message.get("role") != "assistant"]
    return "\n\n".join(filter(None, map(text_of, messages)))


def _as_mcp(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InputError("This environment offers a tool that is not a function.")
    return {
        "name": function.get("name", ""),
        "description": function.get("description") or "",
        "input_schema": function.get("parameters") or {},
    }


INVALID_REQUEST: Final = -32600
_NO_METHOD: Final = -32601
_INVALID_PARAMS: Final = -32602
_FAILED: Final = -32603


async def answer_rpc(request: Any, session: Session | None) -> dict[str, Any]:
    if not isinstance(request, dict) or request.get("jsonrpc") != "2.0":
        return rpc_error(None, INVALID_REQUEST, "This is not a JSON-RPC 2.0 request.")
    number, method, params = request.get("id"), request.get("method"), request.get("params") or {}
    if not isinstance(number, str | int | float | None):
        return rpc_error(None, INVALID_REQUEST, "id must be a string or a number.")
    if not isinstance(params, dict):
        return rpc_error(number, _INVALID_PARAMS, "params must be an object.")
    if session is None:
        return rpc_error(number, _NO_METHOD, "Tools belong to an episode: use them at /ws.")
    try:
        match method:
            case "tools/list":
                answer = await session.step(Action(type="list_tools"))
                return rpc_result(number, {"tools": answer.observation["tools"]})
            case "tools/call":
                return rpc_result(number, await _called(params, session))
    except ValidationError as error:
        return rpc_error(number, _INVALID_PARAMS, str(error))
    except UsageError as error:
        return rpc_error(number, _INVALID_PARAMS, error.message)
    except EnvserverError as error:
        return rpc_error(number, _FAILED, f"The episode failed: {error.kind}.")
    return rpc_error(number, _NO_METHOD, f"There is no method {str(method)[:80]!r}.")


async def _called(params: dict[str, Any], session: Session) -> dict[str, Any]:
    action = Action(
        type="call_tool",
        tool_name=params.get("name") or "",
        arguments=params.get("arguments") or {},
    )
    answer = await session.step(action)
    text = answer.observation["text"]
    return {
        "content": [{"type": "text", "text": text}],
        "isError": False,
        "reward": answer.reward,
        "done": answer.done,
    }


def rpc_result(number: Any, result: dict[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "result": result}


def rpc_error(number: Any, code: int, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}


_MOST_AHEAD: Final = 16
"""Messages that a client may send before it has an answer; its protocol sends one."""
_CLOSE_SECONDS: Final = 10.0
"""For the end of a connection whose client may take nothing any more."""

_log = structlog.get_logger(__name__)


async def converse(websocket: WebSocket, session: Session, idle_seconds: float) -> None:
    """Serves one connection until its client ends it or is silent for `idle_seconds`."""
    await websocket.accept()
    incoming: asyncio.Queue[str] = asyncio.Queue(_MOST_AHEAD)
    tasks = (
        asyncio.create_task(_receive(websocket, incoming)),
        asyncio.create_task(_answer_all(websocket, incoming, session, idle_seconds)),
    )
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ends = await cancel_and_wait(*tasks)
        await session.close()
        with suppress(RuntimeError, WebSocketDisconnect, TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await websocket.close()
    for end in ends:
        if isinstance(end, Exception) and not isinstance(end, WebSocketDisconnect):
            raise end


async def _receive(websocket: WebSocket, incoming: asyncio.Queue[str]) -> None:
    """Puts what comes into `incoming`; ends with the connection, or if too much comes."""
    with suppress(WebSocketDisconnect, asyncio.QueueFull):
        while True:
            incoming.put_nowait(await websocket.receive_text())


async def _answer_all(
    websocket: WebSocket, incoming: asyncio.Queue[str], session: Session, idle_seconds: float
) -> None:
    while True:
        try:
            async with asyncio.timeout(idle_seconds):
                text = await incoming.get()
        except TimeoutError:
            silence = _error(f"No message arrived for {idle_seconds:g} seconds.", "SESSION_ERROR")
            await websocket.send_text(orjson.dumps(silence).decode())
            return
        answer = await _answered(text, session)
        if answer is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(idle_seconds):
                await websocket.send_text(orjson.dumps(answer).decode())
                continue
        return  # the client takes nothing any more


async def _answered(text: str, session: Session) -> dict[str, Any] | None:
    """Returns the answer to one message; None: the client says that it ends."""
    try:
        message = orjson.loads(text)
    except ValueError as error:
        return _error(f"Invalid JSON: {error}", "INVALID_JSON")
    kind = message.get("type") if isinstance(message, dict) else None
    data = message.get("data") if isinstance(message, dict) else None
    try:
        match kind:
            case "reset":
                return _observed(await session.reset(Reset.model_validate(data or {})))
            case "step":
                return _observed(await session.step(Action.model_validate(data)))
            case "state":
                return {"type": "state", "data": session.state().model_dump()}
            case "mcp":
                return {"type": "mcp", "data": await answer_rpc(data, session)}
            case "close":
                return None
            case _:
                return _error(f"Unknown message type: {str(kind)[:80]!r}", "UNKNOWN_TYPE")
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        return _error("Invalid message", "VALIDATION_ERROR", errors=errors)
    except EpisodesFull as error:
        return _error(str(error), "CAPACITY_REACHED", **error.detail)
    except UsageError as error:
        return _error(str(error), "EXECUTION_ERROR", kind=error.kind)
    except EnvserverError as error:
        return _error(failure_text(error), "EXECUTION_ERROR", kind=error.kind)
    except Exception as error:  # noqa: BLE001 - logged; the session stays open
        _log.exception("session_failed")
        return _error(f"The server failed: {type(error).__name__}.", "EXECUTION_ERROR")


def _observed(answer: Answer) -> dict[str, Any]:
    return {"type": "observation", "data": answer.model_dump()}


def _error(message: str, code: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


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
    answer_errors(app)
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
    assert isinstance(error, EnvserverError)
    if isinstance(error, UsageError):
        return await on_ours(request, error)
    message = failure_text(error)
    return error_answer(request.url.path, error.status, message, kind=error.kind)


def _description(environment: Environment) -> str:
    text = inspect.getdoc(type(environment)) or ""
    return text.partition("\n")[0] or environment.name
