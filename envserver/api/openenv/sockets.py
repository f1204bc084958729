"""OpenEnv's sessions over a WebSocket: one message, one answer.

In: `reset`, `step`, `state`, `mcp` and `close` messages. Out: observations, states and errors.
What always holds: an error leaves the session open; the session ends with the connection, also in
the middle of a step, or when its client is silent for too long.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

import orjson
import structlog
from envserver_records.cancelling import cancel_and_wait
from envserver_records.errors import EnvserverError, UsageError
from pydantic import ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect

from ...rollouts.episodes import EpisodesFull
from .models import Action, Answer, Reset
from .rpc import answer_rpc
from .session import Session, failure_text

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
            silence = _error(f"Nothing came for {idle_seconds:g} seconds.", "SESSION_ERROR")
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
