"""A client of OpenEnv's WebSocket, on aiohttp, and environments played by their demonstrations."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from envserver_records.records import Json, Message

from .waiting import PATIENCE


class Socket:
    def __init__(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        self.connection = connection

    async def ask(self, kind: str, data: Any = None) -> Json:
        """The whole answer to a message."""
        await self.connection.send_json({"type": kind, **({} if data is None else {"data": data})})
        answer = await self.connection.receive_json(timeout=PATIENCE)
        assert isinstance(answer, dict)
        return answer

    async def seen(self, kind: str, data: Any = None) -> Json:
        """The data of an answer that is no error."""
        answer = await self.ask(kind, data)
        assert answer["type"] != "error", answer
        data = answer["data"]
        assert isinstance(data, dict)
        return data

    async def code(self, kind: str, data: Any = None) -> str:
        answer = await self.ask(kind, data)
        assert answer["type"] == "error", answer
        return str(answer["data"]["code"])


@asynccontextmanager
async def socket(url: str, name: str, **headers: str) -> AsyncIterator[Socket]:
    """A session with the environment `name` of the server at `url`."""
    async with (
        aiohttp.ClientSession() as http,
        http.ws_connect(f"{url}/openenv/{name}/ws", headers=headers) as connection,
    ):
        yield Socket(connection)


def action_of(message: Message) -> Json:
    """An assistant's message as an action."""
    calls = [
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in message.get("tool_calls") or ()
    ]
    return {"message": message.get("content") or "", "tool_calls": calls}
