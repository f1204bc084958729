"""Our server's side of the connection: services that drive a session for each attempt.

In: `begin` and `step` from a rollout. Out: observations, tools and rewards. What always holds: an
attempt has one session, from its first request to its end; a server that is full is waited for.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp

from envserver import Caller, ConfigError, Service, ServiceError, Services, Task

from .agent import ACT, act_tool, mode_of, text_field, tools_of
from .client import Full, InvalidAction, Session, StepResult, Timeouts, action_schema, session

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
            f"openenv:{address} needs Docker or Podman, and neither is here.",
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
    timeouts = Timeouts(config.connect_seconds, config.answer_seconds)
    async with started(address) as url, aiohttp.ClientSession(headers=headers) as http:
        server = _Server(http, url, timeouts, config)
        yield Services({"begin": _begin, "step": _step}, state=server.play)


class _Server:
    def __init__(
        self, http: aiohttp.ClientSession, url: str, timeouts: Timeouts, config: Any
    ) -> None:
        self._http = http
        self._url = url
        self._timeouts = timeouts
        self._config = config
        self._schema: dict[str, Any] | None = None

    @asynccontextmanager
    async def play(self, task: Task) -> AsyncIterator[_Play]:
        """The state of one attempt: a session, in which its episode has begun."""
        if self._schema is None:
            self._schema = await action_schema(self._http, self._url, self._timeouts)
        async with AsyncExitStack() as stack:
            opened, first = await self._begun(stack, task.public["reset"])
            yield await _play(opened, first, self._schema)

    async def _begun(
        self, stack: AsyncExitStack, arguments: Mapping[str, Any]
    ) -> tuple[Session, StepResult]:
        deadline = asyncio.get_running_loop().time() + self._config.wait_seconds
        while True:
            async with AsyncExitStack() as trying:
                one = await trying.enter_async_context(
                    session(
                        self._http,
                        self._url,
                        self._timeouts,
                        blames_model=self._config.server_errors == "model",
                    )
                )
                try:
                    first = await one.reset(arguments)
                except Full:
                    if asyncio.get_running_loop().time() > deadline:
                        raise ServiceError(
                            f"The OpenEnv server was full for {self._config.wait_seconds:g} s.",
                            hint="Set --rollouts.max_concurrent to the number of its sessions.",
                        ) from None
                else:
                    stack.push_async_exit(trying.pop_all())
                    return one, first
            await asyncio.sleep(_AGAIN_SECONDS * (0.5 + random.random()))  # not all at once


class _Play:
    def __init__(self, session: Session, first: dict[str, Any]) -> None:
        self.session = session
        self.first = first


async def _play(session: Session, first: StepResult, schema: dict[str, Any]) -> _Play:
    mode = mode_of(schema)
    tools = [act_tool(schema)] if mode == "act" else []
    if mode == "tools" and not first.done:
        try:
            tools = tools_of((await session.step({"type": "list_tools"})).observation)
        except InvalidAction as error:
            raise ServiceError(f"The OpenEnv server does not list its tools: {error}") from error
    facts = {"mode": mode, "tools": tools, "text_field": text_field(schema), "act": ACT}
    return _Play(session, {**_shown(first), **facts})


async def _begin(arguments: dict[str, Any], caller: Caller) -> Any:
    """Returns the first observation, the tools, and how the model acts."""
    return caller.state.first


async def _step(arguments: dict[str, Any], caller: Caller) -> Any:
    """Takes an action; `invalid` says why the server refuses it."""
    try:
        return _shown(await caller.state.session.step(arguments["action"]))
    except InvalidAction as error:
        return {"invalid": str(error)}


def _shown(result: StepResult) -> dict[str, Any]:
    return {"observation": result.observation, "reward": result.reward, "done": result.done}
