"""Our server's side of the connection: services that drive a session for each attempt, from its
first request to its end; a server that is full is waited for."""

from __future__ import annotations

import asyncio
import json
import math
import random
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import aiohttp
from envserver_records.tasks import Json

from envserver import Caller, ConfigError, Service, ServiceError, Services, Task

from .agent import ACT, act_tool, mode_of, text_field, tools_of

_MOST_BYTES = 16 << 20
_MOST_TEXT = 500


class InvalidAction(Exception):
    """The server refuses an action: its fields are wrong, or it raised on it."""


class Full(Exception):
    """The server has as many sessions as it may."""


def step_result(data: Any) -> Json:
    """Checks the answer to a reset or a step: its `observation`, `reward` and `done`."""
    found = data if isinstance(data, dict) else {}
    observation, reward = found.get("observation"), found.get("reward")
    if not isinstance(observation, dict):
        raise ServiceError("The OpenEnv server answered without an observation.")
    if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
        raise ServiceError(f"The OpenEnv server gave a reward that is not a number: {reward!r}.")
    number = None if reward is None else float(reward)
    return {"observation": observation, "reward": number, "done": bool(found.get("done"))}


class Session:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse, config: Any) -> None:
        self._socket = socket
        self._seconds: float = config.answer_seconds
        self._blames_model = config.server_errors == "model"
        self._turn = asyncio.Lock()

    async def reset(self, arguments: Json) -> Json:
        try:
            return step_result(await self._ask("reset", dict(arguments)))
        except InvalidAction as error:
            raise ServiceError(
                f"The OpenEnv server cannot reset: {error}", hint="See --env.reset."
            ) from error

    async def step(self, action: Json) -> Json:
        return step_result(await self._ask("step", dict(action)))

    async def _ask(self, kind: str, data: Json) -> Any:
        async with self._turn:
            try:
                async with asyncio.timeout(self._seconds):
                    # A server that is full says so and closes, maybe before it is asked.
                    with suppress(ConnectionError):
                        await self._socket.send_json({"type": kind, "data": data})
                    message = await self._socket.receive()
            except TimeoutError as error:
                # Its late answer would be taken for the next one's.
                await self._socket.close()
                raise ServiceError(
                    f"The OpenEnv server did not answer {kind} in {self._seconds:g} s.",
                    hint="See --env.answer_seconds.",
                ) from error
            except (aiohttp.ClientError, ConnectionError) as error:
                raise _gone() from error
        return self._read(kind, message)

    def _read(self, kind: str, message: aiohttp.WSMessage) -> Any:
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise _gone()
        try:
            answer = json.loads(message.data)
        except ValueError as error:
            raise ServiceError("The OpenEnv server's answer is not JSON.") from error
        of = answer.get("type") if isinstance(answer, dict) else None
        if of == "observation":
            return answer.get("data")
        if of != "error":
            raise ServiceError(f"The OpenEnv server answered {kind} with {str(of)[:40]!r}.")
        raise self._error(kind, answer.get("data"))

    def _error(self, kind: str, data: Any) -> Exception:
        facts = data if isinstance(data, dict) else {}
        code, text = facts.get("code"), str(facts.get("message", ""))[:_MOST_TEXT]
        if code == "CAPACITY_REACHED":
            return Full()
        if code == "VALIDATION_ERROR" or (code == "EXECUTION_ERROR" and self._blames_model):
            return InvalidAction(f"{text} {_places(facts.get('errors'))}".strip())
        return ServiceError(
            f"The OpenEnv server failed: {code}: {text}",
            hint="If it raises on illegal actions of the model, set --env.server_errors model.",
        )


@asynccontextmanager
async def session(http: aiohttp.ClientSession, url: str, config: Any) -> AsyncIterator[Session]:
    """Connects to a server; the session ends with the block. `config`: of `OpenEnv`."""
    try:
        async with asyncio.timeout(config.connect_seconds):
            socket = await http.ws_connect(f"{url}/ws", max_msg_size=_MOST_BYTES)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise ServiceError(f"The OpenEnv server does not answer at {shown(url)}.") from error
    try:
        yield Session(socket, config)
    finally:
        with suppress(aiohttp.ClientError, OSError):
            await socket.send_json({"type": "close"})
        await socket.close()


async def action_schema(http: aiohttp.ClientSession, url: str, config: Any) -> Json:
    try:
        async with asyncio.timeout(config.answer_seconds), http.get(f"{url}/schema") as answer:
            answer.raise_for_status()
            found = json.loads(await answer.text())
    except (aiohttp.ClientResponseError, ValueError) as error:
        raise ServiceError(f"The OpenEnv server has no schema at {shown(url)}.") from error
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise ServiceError(f"The OpenEnv server does not answer at {shown(url)}.") from error
    schema = found.get("action") if isinstance(found, dict) else None
    if not isinstance(schema, dict):
        raise ServiceError(f"The OpenEnv server's schema at {shown(url)} has no action.")
    return schema


def shown(url: str) -> str:
    """Returns the address without what may be secret."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _places(errors: Any) -> str:
    found = (
        [error for error in errors if isinstance(error, dict)] if isinstance(errors, list) else []
    )
    lines = [
        f"{'.'.join(map(str, error.get('loc') or ()))}: {error.get('msg', '')}"
        for error in found[:5]
    ]
    return "; ".join(lines)[:_MOST_TEXT]


def _gone() -> ServiceError:
    return ServiceError("The OpenEnv server closed the connection.")


_SCHEME = "docker://"
_PORT = "8000"
_START_SECONDS = 120.0


@asynccontextmanager
async def started(address: str) -> AsyncIterator[str]:
    """Yields the address of a server; that of an image's container, which ends with the block."""
    if not address.startswith(_SCHEME):
        yield address
        return
    program = shutil.which("docker") or shutil.which("podman")
    if program is None:
        raise ConfigError(
            f"openenv:{address} needs Docker or Podman, and neither is installed.",
            hint="Start the server on another machine: --env openenv:http://host:8000.",
        )
    image = address.removeprefix(_SCHEME)
    words = ("run", "--detach", "--publish", f"127.0.0.1::{_PORT}", image)
    container = (await _output(program, *words)).strip()
    try:
        url = await _healthy(program, container)
        yield url
    finally:
        await _output(program, "rm", "--force", "--volumes", container)


async def _healthy(program: str, container: str) -> str:
    try:
        async with asyncio.timeout(_START_SECONDS), aiohttp.ClientSession() as http:
            while True:
                place = await _place(program, container)
                try:
                    async with http.get(f"http://{place}/health") as answer:
                        if answer.status == 200:
                            return f"http://{place}"
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.2)
    except TimeoutError as error:
        raise ConfigError(
            f"The container's server did not answer in {_START_SECONDS:g} s."
        ) from error


async def _place(program: str, container: str) -> str:
    code, out, err = await _run(program, "port", container, _PORT)
    await _check_runs(program, container)
    if code != 0:
        raise ConfigError(f"{program} port failed: {err[-500:]}")
    return out.split()[0]


async def _check_runs(program: str, container: str) -> None:
    words = ("inspect", "--format", "{{.State.Running}}", container)
    if (await _output(program, *words)).strip() == "true":
        return
    _, out, err = await _run(program, "logs", "--tail", "20", container)
    said = (err or out)[-500:].strip()
    raise ConfigError(f"The container of the OpenEnv server has ended: {said}")


async def _output(*words: str) -> str:
    code, out, err = await _run(*words)
    if code != 0:
        raise ConfigError(f"{' '.join(words[:2])} failed: {err[-500:]}")
    return out


async def _run(*words: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(errors="replace"), err.decode(errors="replace")


_AGAIN_SECONDS = 0.5


@asynccontextmanager
async def connected(address: str, config: Any) -> AsyncIterator[Mapping[str, Service]]:
    """Yields the services of an environment; starts the server if it is an image."""
    headers = {}
    if config.token is not None:
        headers["Authorization"] = f"Bearer {config.token.get_secret_value()}"
    async with started(address) as url, aiohttp.ClientSession(headers=headers) as http:
        server = _Server(http, url, config)
        yield Services({"begin": _begin, "step": _step}, state=server.play)


class _Server:
    def __init__(self, http: aiohttp.ClientSession, url: str, config: Any) -> None:
        self._server = (http, url, config)
        self._wait_seconds: float = config.wait_seconds
        self._schema: Json | None = None

    @asynccontextmanager
    async def play(self, task: Task) -> AsyncIterator[_Play]:
        """The state of one attempt: a session, in which its episode has begun."""
        if self._schema is None:
            self._schema = await action_schema(*self._server)
        deadline = asyncio.get_running_loop().time() + self._wait_seconds
        while True:
            async with session(*self._server) as opened:
                try:
                    first = await opened.reset(task.public["reset"])
                except Full:
                    if asyncio.get_running_loop().time() > deadline:
                        raise ServiceError(
                            f"The OpenEnv server was full for {self._wait_seconds:g} s.",
                            hint="Set --rollouts.max_concurrent to the number of its sessions.",
                        ) from None
                else:
                    yield await _play(opened, first, self._schema)
                    return
            await asyncio.sleep(_AGAIN_SECONDS * (0.5 + random.random()))  # not all at once


class _Play(NamedTuple):
    session: Session
    first: Json


async def _play(session: Session, first: Json, schema: Json) -> _Play:
    mode = mode_of(schema)
    tools = [act_tool(schema)] if mode == "act" else []
    if mode == "tools" and not first["done"]:
        try:
            tools = tools_of((await session.step({"type": "list_tools"}))["observation"])
        except InvalidAction as error:
            raise ServiceError(f"The OpenEnv server does not list its tools: {error}") from error
    facts = {"mode": mode, "tools": tools, "text_field": text_field(schema), "act": ACT}
    return _Play(session, {**first, **facts})


async def _begin(arguments: Json, caller: Caller) -> Any:
    return caller.state.first


async def _step(arguments: Json, caller: Caller) -> Any:
    """Takes an action; `invalid` says why the server refuses it."""
    try:
        return await caller.state.session.step(arguments["action"])
    except InvalidAction as error:
        return {"invalid": str(error)}
