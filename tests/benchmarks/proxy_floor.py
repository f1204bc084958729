"""The parts of a continued call in tokens mode that every proxy of its kind needs: `floor_app`.

uvicorn, our HTTP client, the chat template, the tokenizer for what is new, and JSON of the payloads
that the proxy in tokens mode reads and writes. Nothing is checked, planned, limited or recorded.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import msgspec
import numpy as np
import orjson
import proxy_calls as calls
from support.templates import CHATML

from envserver.models.connections import Connections, whole
from envserver.models.replicas import Replica
from envserver.proxy import AsgiApp, Receive, Scope, Send
from envserver.proxy.asgi import send_json
from envserver.proxy.engine_client.generated import BareGenerated
from envserver.proxy.engine_client.tokens import GENERATE, RENDER
from envserver.proxy.requests import answer_lifespan
from envserver.tokens.template import ChatTemplate

_DERENDER = "/v1/chat/completions/derender"
_BETWEEN = "\n<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n"


def floor_app(engine_url: str, connections: Connections) -> AsgiApp:
    """Answers continued calls; `GET /r/attempts/N` as of `proxy_servers`."""
    floor = _Floor(engine_url, connections)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await answer_lifespan(receive, send)
        elif scope["path"].startswith("/r/attempts/"):
            floor.prompts = {f"{at}": [] for at in range(int(scope["path"].rpartition("/")[2]))}
            await send_json(send, 200, [*floor.prompts])
        else:
            body = b""
            while (message := await receive()).get("more_body"):
                body += message["body"]
            request = orjson.loads(body + message["body"])
            key = scope["path"].split("/")[2]
            await send_json(send, 200, await floor.answer(floor.prompts[key], request))

    return app


class _Floor:
    """`prompts`: the tokens of each conversation so far."""

    def __init__(self, engine_url: str, connections: Connections) -> None:
        self.prompts: dict[str, list[int]] = {}
        self._connections = connections
        self._replica = Replica(engine_url, 512, time.monotonic)
        self._frames: dict[bool, Any] = {}
        self._template = ChatTemplate(CHATML, {})

    async def answer(self, ids: list[int], request: dict[str, Any]) -> dict[str, Any]:
        messages, tools = request["messages"], request.get("tools")
        text = self._template.render(messages, tools, generation_prompt=True, kwargs={})
        ids += calls.FORMAT.encode(_BETWEEN % messages[-1]["content"] if ids else text)
        if bool(tools) not in self._frames:
            self._frames[bool(tools)] = await self._post(RENDER, orjson.dumps(request))
        asked = {**self._frames[bool(tools)], "token_ids": ids, "return_token_ids": True}
        generated = await self._post(GENERATE, orjson.dumps(asked), BareGenerated)
        [choice] = generated["choices"]
        for recorded in (ids, choice["token_ids"]):
            np.asarray(recorded, np.int32)
        message = {"role": "assistant", "content": choice["text"]}
        if tools:
            made = {"prompt_token_ids": ids, "choices": [{"token_ids": choice["token_ids"]}]}
            parse = orjson.dumps({"chat_request": request, "generate_response": made})
            message = (await self._post(_DERENDER, parse))["choices"][0]["message"]
        ids += choice["token_ids"]
        told = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": "1", "model": calls.MODEL, "choices": [told], "usage": generated["usage"]}

    async def _post(self, path: str, payload: bytes, form: type | None = None) -> Any:
        async with self._connections.open(self._replica, "POST", path, payload) as response:
            data = await whole(response)
        return orjson.loads(data) if form is None else _decoder(form).decode(data)


@cache
def _decoder(form: type) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(form)
