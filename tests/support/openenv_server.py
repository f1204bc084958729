"""A stand-in for OpenEnv servers on aiohttp: games by path, and every way to fail."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from envserver_records.tasks import Json

from envserver import aio
from support.serving import serving_aiohttp

_TEXT = {"properties": {"metadata": {"type": "object"}, "guess": {"type": "string"}}}
_ACT = {"properties": {"row": {"type": "integer"}, "column": {"type": "integer"}}}
_ACT |= {"required": ["row", "column"]}
_TOOLS = {"properties": {"type": {"type": "string"}, "tool_name": {"type": "string"}}}
SCHEMAS = {"guess": _TEXT, "board": _ACT, "desk": _TOOLS}
OPENING = "Guess a number from 1 to 9."


class Server:
    """The sessions of a served stand-in.

    Args:
        fault: what happens at the first `faults` steps: gone, garbage, slow, raises, nan, other.
        most: number of sessions at a time.
    """

    def __init__(self, fault: str = "", faults: int = 1, most: int = 100) -> None:
        self.url = ""
        self.open = 0
        self.most_open = 0
        self.seen: Counter[str] = Counter()
        self.resets: list[Json] = []
        self._fault, self._faults, self._most = fault, faults, most

    async def schema(self, request: web.Request) -> web.Response:
        schema = SCHEMAS[request.match_info["game"]]
        return web.json_response({"action": schema, "observation": {}, "state": {}})

    async def session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        # As openenv's server: a session has its place from the connection on.
        if self.open >= self._most:
            await socket.send_str(_error("CAPACITY_REACHED", max_sessions=self._most))
            await socket.close()
            return socket
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            async for message in socket:
                answer = await self._answer(request.match_info["game"], json.loads(message.data))
                if answer is None:
                    break
                await socket.send_str(answer)
        finally:
            self.open -= 1
        return socket

    async def _answer(self, game: str, message: Json) -> str | None:
        kind, data = message["type"], message.get("data")
        self.seen[kind] += 1
        if kind == "close":
            return None
        if kind == "reset":
            self.resets.append(data)
            return _observed({"text": OPENING} if game == "guess" else {"board": "...", "turn": 1})
        if self._fault and self._faults and (data or {}).get("type") != "list_tools":
            self._faults -= 1
            if self._fault == "slow":
                await asyncio.sleep(60)
            faults = {
                "gone": None,
                "garbage": "garbage",
                "raises": _error("EXECUTION_ERROR"),
                "nan": '{"type": "observation", "data": {"observation": {}, "reward": NaN}}',
                "other": '{"type": "state", "data": {}}',
            }
            return faults[self._fault]
        return _GAMES[game](data)


def _guess(action: Json) -> str:
    text = action.get("guess", "")
    if not text.isdigit():
        return _error("VALIDATION_ERROR", errors=[{"loc": ["guess"], "msg": "not a number"}])
    if text == "7":
        return _observed({"text": "Right."}, reward=1.0, done=True)
    return _observed({"text": "More." if int(text) < 7 else "Less."}, reward=0.1)


def _board(action: Json) -> str:
    won = action == {"row": 1, "column": 2}
    return _observed({"board": "x..", "turn": 2}, reward=float(won), done=won)


def _desk(action: Json) -> str:
    if action["type"] == "list_tools":
        schema = {"type": "object", "properties": {"number": {"type": "integer"}}}
        tools = [{"name": "save", "description": "Saves.", "input_schema": schema}]
        return _observed({"tools": tools})
    if action["arguments"] != {"number": 7}:
        return _observed({"tool_name": "save", "error": {"message": "Only 7 is saved."}})
    text = {"content": [{"type": "text", "text": "saved"}], "data": None}
    return _observed({"tool_name": "save", "result": text}, reward=1.0, done=True)


_GAMES = {"guess": _guess, "board": _board, "desk": _desk}


def _observed(observation: Json, reward: float | None = None, done: bool = False) -> str:
    data = {"observation": observation, "reward": reward, "done": done}
    return json.dumps({"type": "observation", "data": data})


def _error(code: str, **more: Any) -> str:
    return json.dumps({"type": "error", "data": {"message": "no", "code": code, **more}})


def call(name: str, **arguments: Any) -> Json:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


def transcript(place: Path, opening: str, *answers: str | Json) -> Path:
    """A model that says these answers, whatever it is told between them."""
    messages: list[Json] = [{"role": "user", "content": opening}]
    for answer in answers:
        said = answer if isinstance(answer, dict) else {"role": "assistant", "content": answer}
        messages += [said, {"role": "user", "content": "?"}]
    place.write_text(json.dumps({"messages": messages[:-1]}))
    return place


async def played(url: str, script: Path, **env: Any) -> Any:
    """What `process` makes of one group of two."""
    return await aio.process(
        f"openenv:{url}",
        model="sim",
        sim={"transcript": script, "latency_seconds": 0},
        env={"total_steps": 1, "group_size": 2, "ensure_scores_are_not_same": False, **env},
        workers={"processes": 1},
        rollouts={"max_attempts": 6},  # on a busy machine, workers may be late
    )


@asynccontextmanager
async def openenv_server(fault: str = "", **more: int) -> AsyncIterator[Server]:
    """Serves on a free port; `{url}/guess`, `/board` and `/desk` are OpenEnv servers."""
    server = Server(fault, **more)
    app = web.Application()
    app.router.add_get("/{game}/schema", server.schema)
    app.router.add_get("/{game}/ws", server.session)
    async with serving_aiohttp(app) as runner:
        server.url = runner.url
        yield server
