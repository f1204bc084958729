"""The APIs without a network or an engine: official clients ask, scripted answers are told.

Streams leave cut at any byte, and the texts of answers come cut at any character.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import anthropic
import httpx2
import openai
import orjson
from envserver_records.errors import EnvserverError
from envserver_records.tasks import Json
from hypothesis import strategies as st

from envserver.proxy.body import read_request
from envserver.proxy.dialects import DIALECTS
from envserver.proxy.dialects.base import ModelRequest
from support.speaking import call

USAGE = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
HI: Json = {"role": "user", "content": "hi"}
THINK = {"type": "enabled", "budget_tokens": 1024}


class Told(NamedTuple):
    """What an answer says, in the words of no dialect. `usage`: tokens of the prompt, sampled."""

    reasoning: str
    text: str
    calls: list[tuple[str, str, Any]]
    usage: tuple[int, int]


class Api:
    """One dialect, and its official client, which checks all that it gets against its types.

    Attributes:
        resource: of the client: what asks.
        final: the method that gives the whole answer of a stream.
        form: the field that names the type of an answer.
        told: what an answer says.
        histories: requests that send it back, with a text as the user's next turn.
        object_in: what the client made of an answer with a type.
        smallest: the smallest request, beside its model.
        thinking: fields by which a client asks for thoughts.
    """

    path: ClassVar[str]
    resource: ClassVar[str]
    final: ClassVar[str]
    form: ClassVar[str]
    smallest: ClassVar[Json]
    client_type: ClassVar[Any] = openai.OpenAI
    client_url: ClassVar[str] = "http://desk/v1"
    thinking: ClassVar[Json] = {}
    refused: ClassVar[Any] = openai.APIStatusError
    broken: ClassVar[Any] = openai.APIError
    strict = True
    told: Any
    histories: Any
    object_in: Any

    def __init__(self) -> None:
        self.adapter = DIALECTS[self.path]

    def __repr__(self) -> str:
        return self.path

    def read(self, memory: Json | None = None, **request: Any) -> ModelRequest:
        body = {"model": "any", **self.smallest, **request}
        return read_request(self.adapter, body, {} if memory is None else memory)

    def client(self, desk: Desk) -> Any:
        return self.client_type(
            base_url=self.client_url,
            api_key="any",
            http_client=desk.http,
            max_retries=0,
            _strict_response_validation=self.strict,
        )

    def endpoint(self, desk: Desk) -> Any:
        return attrgetter(self.resource)(self.client(desk))

    def create(self, desk: Desk, streamed: bool = False, **asked: Any) -> Any:
        """The client's own answer, whole or put together from a stream."""
        asked = {"model": "any", **self.smallest, **asked}
        return (self.streamed if streamed else self.whole)(self.endpoint(desk), asked)

    def whole(self, endpoint: Any, asked: Json) -> Any:
        return endpoint.create(**asked)

    def streamed(self, endpoint: Any, asked: Json) -> Any:
        with endpoint.stream(**asked) as stream:
            return getattr(stream, self.final)()

    def parsed(self, desk: Desk, form: Any) -> Any:
        """An object of the type `form`, as the client makes it of an answer."""
        asked = {"model": "any", **self.smallest, self.form: form}
        return self.object_in(self.endpoint(desk).parse(**asked))

    def compared(self, answer: Any) -> Any:
        """All of an answer that is the same whole and streamed."""
        return self.told(answer)

    def kind(self, error: Any) -> Any:
        """What a client tells errors apart by."""
        return error.code


class Chat(Api):
    path = "v1/chat/completions"
    resource, final, form = "chat.completions", "get_final_completion", "response_format"
    smallest = {"messages": [HI]}

    def told(self, answer: Any) -> Told:
        message = answer.choices[0].message
        calls = [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or ()]
        usage = (answer.usage.prompt_tokens, answer.usage.completion_tokens)
        return Told(getattr(message, "reasoning", ""), message.content or "", calls, usage)

    def histories(self, answer: Any, text: str) -> Iterator[Json]:
        yield {"messages": [HI, answer.choices[0].message.to_dict(), {**HI, "content": text}]}

    def object_in(self, answer: Any) -> Any:
        return answer.choices[0].message.parsed


class Texts(Api):
    path = "v1/completions"
    resource = "completions"
    smallest = {"prompt": "hi"}
    strict = (
        False  # of chunks the client's types forbid a finish_reason of null, as OpenAI sends it
    )

    def whole(self, endpoint: Any, asked: Json) -> Any:
        return [endpoint.create(**asked)]

    def streamed(self, endpoint: Any, asked: Json) -> Any:
        return [*endpoint.create(**asked, stream=True)]

    def told(self, answer: Any) -> Told:
        text = "".join(choice.text for part in answer for choice in part.choices)
        return Told(
            "", text, [], (answer[-1].usage.prompt_tokens, answer[-1].usage.completion_tokens)
        )


class Responses(Api):
    path = "v1/responses"
    resource, form = "responses", "text_format"
    smallest = {"input": "hi"}

    def streamed(self, endpoint: Any, asked: Json) -> Any:
        *_, last = endpoint.create(**asked, stream=True)
        return last.response

    def told(self, answer: Any) -> Told:
        thoughts = [item.content[0].text for item in answer.output if item.type == "reasoning"]
        calls = [item for item in answer.output if item.type == "function_call"]
        told = [(call.call_id, call.name, call.arguments) for call in calls]
        usage = (answer.usage.input_tokens, answer.usage.output_tokens)
        return Told("".join(thoughts), answer.output_text, told, usage)

    def compared(self, answer: Any) -> Any:
        told = answer.model_dump(exclude_none=True)
        for item in told["output"]:
            del item["id"]
            item.pop("parsed_arguments", None)
        return {name: told[name] for name in told if name not in ("id", "completed_at")}

    def histories(self, answer: Any, text: str) -> Iterator[Json]:
        then = {**HI, "content": text}
        yield {"input": [HI, *answer.output, then]}
        yield {"input": [then], "previous_response_id": answer.id}

    def object_in(self, answer: Any) -> Any:
        return answer.output_parsed


class Messages(Api):
    path = "v1/messages"
    resource, final, form = "messages", "get_final_message", "output_format"
    client_type, client_url = anthropic.Anthropic, "http://desk"
    smallest = {"max_tokens": 50, "messages": [HI]}
    thinking = {"max_tokens": 2000, "thinking": THINK}
    refused = broken = anthropic.APIStatusError

    def told(self, answer: Any) -> Told:
        by_kind: dict[str, list[Any]] = {"thinking": [], "text": [], "tool_use": []}
        for block in answer.content:
            by_kind[block.type].append(block)
        thoughts = "".join(block.thinking for block in by_kind["thinking"])
        text = "".join(block.text for block in by_kind["text"])
        calls = [(block.id, block.name, json.dumps(block.input)) for block in by_kind["tool_use"]]
        return Told(thoughts, text, calls, (answer.usage.input_tokens, answer.usage.output_tokens))

    def compared(self, answer: Any) -> Any:
        told = answer.model_dump(exclude={"id"})
        for block in told["content"]:
            block.pop("parsed_output", None)
        return _floats(told)

    def histories(self, answer: Any, text: str) -> Iterator[Json]:
        then = {"role": "user", "content": [{"type": "text", "text": text}]}
        yield {"messages": [HI, {"role": "assistant", "content": answer.content}, then]}

    def object_in(self, answer: Any) -> Any:
        return answer.parsed_output

    def kind(self, error: Any) -> Any:
        return error.type


def _floats(value: Any) -> Any:
    """`value` with numbers as whole answers hold them: JSON's, without what is beyond 64 bits."""
    if isinstance(value, dict):
        return {key: _floats(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_floats(inner) for inner in value]
    return float(value) if type(value) is int else value


CHAT, TEXTS, RESPONSES, MESSAGES = Chat(), Texts(), Responses(), Messages()


class Desk:
    """Answers requests with `answers`, one after the other; an error among them is told.

    Args:
        piece: characters per chunk, and (prime to it) bytes per read.
        broken: breaks every stream where its answer's end would be told.
    """

    def __init__(
        self,
        api: Api,
        *answers: Json | EnvserverError,
        piece: int = 3,
        broken: EnvserverError | None = None,
    ) -> None:
        self.api = api.adapter
        self.answers = list(answers)
        self.piece = piece
        self.broken = broken
        self.memory: Json = {}
        self.asks: list[ModelRequest] = []

    @property
    def http(self) -> httpx2.Client:
        return httpx2.Client(transport=httpx2.MockTransport(self._respond))

    @property
    def ask(self) -> ModelRequest:
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

    def _events(self, ask: ModelRequest, answer: Json) -> Iterator[bytes]:
        writer = self.api.writer(ask, self.memory)
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
    calls: list[Json] | None = None,
    finish: str | None = None,
    stop: str | None = None,
    logprobs: list[Json] | None = None,
) -> Json:
    """A whole answer, as an engine gives it and the proxy cleans it."""
    message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    finish = finish or ("tool_calls" if calls else "stop")
    choice = _choice("message", message, logprobs, finish, stop)
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1_700_000_000}
    return {**head, "model": "tiny", "choices": [choice], "usage": USAGE}


def message_of(answer: Json) -> Json:
    """The assistant's message in a whole answer."""
    message: Json = answer["choices"][0]["message"]
    return message


def chunks_of(answer: Json, piece: int) -> Iterator[Json]:
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


def _choice(
    part: str,
    said: Json,
    logprobs: list[Any] | None = None,
    finish: str | None = None,
    stop: str | None = None,
) -> Json:
    return {
        "index": 0,
        part: said,
        "logprobs": None if logprobs is None else {"content": logprobs},
        "finish_reason": finish,
        "stop_reason": stop,
    }


def _chunk(answer: Json, delta: Json, **how: Any) -> Json:
    return {**_head(answer), "choices": [_choice("delta", delta, **how)], "usage": None}


def _head(answer: Json) -> Json:
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
def chat_answers(draw: st.DrawFn) -> Json:
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
def mangled(draw: st.DrawFn, request: Json, values: st.SearchStrategy[Any] = json_values) -> Json:
    """`request` with something in it replaced by one of `values`."""
    return _replaced(request, draw(st.sampled_from(list(_paths(request)))), draw(values))


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
