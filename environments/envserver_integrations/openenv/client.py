"""A client of OpenEnv's protocol (0.10, and 0.3): a session over a WebSocket, and `/schema`.

In: reset arguments and actions. Out: what the server answers. What always holds: one message, one
answer; a server that is gone, slow, or answers something else is a ServiceError, after which the
session is of no use; an action that the server's schema refuses is an InvalidAction.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from envserver import ServiceError

_MOST_BYTES: Final = 16 << 20
_MOST_TEXT: Final = 500


class InvalidAction(Exception):
    """The server refuses an action: its fields are wrong, or it raised on it."""


class Full(Exception):
    """The server has as many sessions as it may."""


class Timeouts:
    """Seconds: to connect, and for each answer."""

    def __init__(self, connect: float, answer: float) -> None:
        self.connect = connect
        self.answer = answer


class StepResult:
    """The answer to a reset or a step."""

    def __init__(self, data: Any) -> None:
        found = data if isinstance(data, dict) else {}
        observation, reward = found.get("observation"), found.get("reward")
        if not isinstance(observation, dict):
            raise ServiceError("The OpenEnv server answered without an observation.")
        if reward is not None and not (
            isinstance(reward, int | float) and math.isfinite(float(reward))
        ):
            raise ServiceError(f"The OpenEnv server gave a reward that is no number: {reward!r}.")
        self.observation: dict[str, Any] = observation
        self.reward = None if reward is None else float(reward)
        self.done = bool(found.get("done"))


class Session:
    """One environment of the server; made by `session`."""

    def __init__(
        self, socket: aiohttp.ClientWebSocketResponse, seconds: float, *, blames_model: bool
    ) -> None:
        self._socket = socket
        self._seconds = seconds
        self._blames_model = blames_model
        self._turn = asyncio.Lock()

    async def reset(self, arguments: Mapping[str, Any]) -> StepResult:
        """Begins an episode."""
        try:
            return StepResult(await self._ask("reset", dict(arguments)))
        except InvalidAction as error:
            raise ServiceError(
                f"The OpenEnv server cannot reset: {error}", hint="See --env.reset."
            ) from error

    async def step(self, action: Mapping[str, Any]) -> StepResult:
        """Takes an action."""
        return StepResult(await self._ask("step", dict(action)))

    async def _ask(self, kind: str, data: dict[str, Any]) -> Any:
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
                    f"The OpenEnv server had no answer to {kind} in {self._seconds:g} s.",
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
async def session(
    http: aiohttp.ClientSession, url: str, timeouts: Timeouts, *, blames_model: bool
) -> AsyncIterator[Session]:
    """Connects to a server; the session ends with the block."""
    try:
        async with asyncio.timeout(timeouts.connect):
            socket = await http.ws_connect(f"{url}/ws", max_msg_size=_MOST_BYTES)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise ServiceError(f"The OpenEnv server does not answer at {shown(url)}.") from error
    try:
        yield Session(socket, timeouts.answer, blames_model=blames_model)
    finally:
        with suppress(aiohttp.ClientError, OSError):
            await socket.send_json({"type": "close"})
        await socket.close()


async def action_schema(
    http: aiohttp.ClientSession, url: str, timeouts: Timeouts
) -> dict[str, Any]:
    """Returns the JSON schema of the server's actions."""
    try:
        async with asyncio.timeout(timeouts.answer), http.get(f"{url}/schema") as answer:
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
    """Returns what is wrong with the fields of an action, as pydantic says it."""
    found = [one for one in errors if isinstance(one, dict)] if isinstance(errors, list) else []
    lines = [
        f"{'.'.join(map(str, one.get('loc') or ()))}: {one.get('msg', '')}" for one in found[:5]
    ]
    return "; ".join(lines)[:_MOST_TEXT]


def _gone() -> ServiceError:
    return ServiceError("The OpenEnv server closed the connection.")
