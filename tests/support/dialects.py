"""An API without a network or an engine: a client's requests are read, scripted answers told.

Streams leave cut at any byte, and the texts of answers come cut at any character.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import orjson
from envserver_records.errors import EnvserverError
from hypothesis import strategies as st

from envserver.proxy.admission import read_request
from envserver.proxy.dialects import DialectAdapter
from envserver.proxy.model_request import ModelRequest

USAGE = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}


class Desk:
    """Answers requests with `answers`, one after the other; an error among them is told.

    Args:
        piece: characters per chunk, and (prime to it) bytes per read.
        broken: breaks every stream where its answer's end would be told.
    """

    def __init__(
        self, api: DialectAdapter, *answers: dict[str, Any] | EnvserverError, piece: int = 3
    ) -> None:
        self.api = api
        self.answers = list(answers)
        self.piece = piece
        self.broken: EnvserverError | None = None
        self.memory: dict[str, Any] = {}
        self.asks: list[ModelRequest] = []

    @property
    def http(self) -> httpx2.Client:
        """For an official client."""
        return httpx2.Client(transport=httpx2.MockTransport(self._respond))

    @property
    def ask(self) -> ModelRequest:
        """The latest."""
        return self.asks[-1]

    def _respond(self, request: httpx2.Request) -> httpx2.Response:
        try:
            ask = read_request(self.api, orjson.loads(request.content), self.memory)
            self.asks.append(ask)
            answer = self.answers.pop(0)
            if isinstance(answer, EnvserverError):
                raise answer
        except EnvserverError as error:
            return httpx2.Response(error.status, json=self.api.error(error))
        if not ask.stream:
            told = orjson.dumps(self.api.whole(ask, answer, self.memory))
            return httpx2.Response(200, content=told, headers={"content-type": "application/json"})
        events = b"".join(self._events(ask, answer))
        return httpx2.Response(
            200, content=_cut(events, self.piece), headers={"content-type": "text/event-stream"}
        )

    def _events(self, ask: ModelRequest, answer: dict[str, Any]) -> Iterator[bytes]:
        writer = self.api.writer(ask, self.memory)
        yield writer.begin()
        *chunks, last, usage = chunks_of(answer, self.piece)
        yield from map(writer.chunk, chunks)
        if self.broken is not None:
            yield writer.fail(self.broken)
            return
        yield from (writer.chunk(last), writer.chunk(usage), writer.end())


def chat_answer(
    text: str | None = "",
    *,
    reasoning: str = "",
    calls: list[dict[str, Any]] | None = None,
    finish: str | None = None,
    stop: str | None = None,
    logprobs: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """A whole answer, as an engine gives it and the proxy cleans it."""
    message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None if logprobs is None else {"content": logprobs},
        "finish_reason": finish or ("tool_calls" if calls else "stop"),
        "stop_reason": stop,
    }
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1_700_000_000}
    return {**head, "model": "tiny", "choices": [choice], "usage": USAGE}


def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call of a chat answer."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def message_of(answer: dict[str, Any]) -> dict[str, Any]:
    """The assistant's message in a whole answer."""
    message: dict[str, Any] = answer["choices"][0]["message"]
    return message


def chunks_of(answer: dict[str, Any], piece: int) -> Iterator[dict[str, Any]]:
    """`answer` as a stream: texts in pieces, calls whole; its end and its usage come last."""
    choice = answer["choices"][0]
    message = choice["message"]
    logprobs = list((choice["logprobs"] or {}).get("content", []))
    yield _chunk(answer, {"role": "assistant", "content": ""})
    for name in ("reasoning", "content"):
        text = message.get(name) or ""
        for at in range(0, len(text), piece):
            told = [logprobs.pop(0)] if logprobs and name == "content" else None
            yield _chunk(answer, {name: text[at : at + piece]}, logprobs=told)
    if logprobs:
        yield _chunk(answer, {}, logprobs=logprobs)
    for index, made in enumerate(message.get("tool_calls") or []):
        yield _chunk(answer, {"tool_calls": [{**made, "index": index}]})
    yield _chunk(answer, {}, finish=choice["finish_reason"], stop=choice["stop_reason"])
    yield {**_head(answer), "choices": [], "usage": answer["usage"]}


def _chunk(
    answer: dict[str, Any],
    delta: dict[str, Any],
    *,
    logprobs: list[Any] | None = None,
    finish: str | None = None,
    stop: str | None = None,
) -> dict[str, Any]:
    choice = {
        "index": 0,
        "delta": delta,
        "logprobs": None if logprobs is None else {"content": logprobs},
        "finish_reason": finish,
        "stop_reason": stop,
    }
    return {**_head(answer), "choices": [choice], "usage": None}


def _head(answer: dict[str, Any]) -> dict[str, Any]:
    return {**{k: answer[k] for k in ("id", "created", "model")}, "object": "chat.completion.chunk"}


def _cut(data: bytes, piece: int) -> Iterator[bytes]:
    size = 1 + 97 * piece
    return (data[at : at + size] for at in range(0, len(data), size))


# Anything at all, for what must never break

texts = st.text(max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def chat_answers(draw: st.DrawFn) -> dict[str, Any]:
    """Answers of every form: with and without each part, calls with objects or with rubbish."""
    arguments = (
        st.dictionaries(texts, json_values, max_size=3).map(
            lambda value: orjson.dumps(value).decode()
        )
        | st.sampled_from(
            ['{"a": 1.0, "b" :[1,2]}', '{"n": 123456789012345678901}', "[1]", "{", ""]
        )
        | texts
    )
    made = [
        call(f"call_{index}", draw(st.sampled_from(["add", "find"])), draw(arguments))
        for index in range(draw(st.integers(0, 3)))
    ]
    text = draw(st.none() | texts if made else texts)
    return chat_answer(text, reasoning=draw(texts), calls=made)


@st.composite
def mangled(
    draw: st.DrawFn, request: dict[str, Any], values: st.SearchStrategy[Any] = json_values
) -> dict[str, Any]:
    """`request` with something in it replaced by one of `values`."""
    path = draw(st.sampled_from(list(_paths(request))))
    return _replaced(request, path, draw(values))


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield from _paths(value[key], (*path, key))


def _replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _replaced(copy[path[0]], path[1:], new)
    return copy
