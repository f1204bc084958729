"""Our server's side of the connection: services that drive a session for each attempt.

In: `begin` and `step` from a rollout. Out: observations, tools and rewards. What always holds: an
attempt has one session, from its first request to its end; a server that is full is waited for.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp

from envserver import Caller, Service, ServiceError, Services, Task

from .actions import ACT, act_tool, mode_of, text_field, tools_of
from .client import Full, InvalidAction, Session, StepResult, Timeouts, action_schema, session
from .docker import started

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
    """The OpenEnv server."""

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
    """One attempt's episode, which has begun."""

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
