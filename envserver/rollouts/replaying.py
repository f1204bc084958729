"""Plays a recorded rollout as an engine: each call gets its recorded answer.

The first difference between the agent and the record is kept (`Player.difference`) and ends the
rollout: every later call is refused.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from envserver_records.errors import EngineRefused, InputError, ServiceError, TokensError
from envserver_records.records import Call, Message, ServiceCall, TracedCall, Trajectory
from msgspec.structs import replace

from ..environment import Caller, Service, Services
from ..models.engine import EngineRequest, ReplicaHealth
from ..proxy.attempts import routing_key
from ..tokens.trace import unpack_calls

Json = dict[str, Any]

_CONTEXT_LINES = 2
_LONGEST_LINE = 400


@dataclass
class Exchange:
    """One request of an agent (`line`: its routing key) and its answers, one for each choice.
    `messages`, `tools`: what it sent; None: not known, so not compared."""

    line: str
    messages: list[Message] | None
    tools: list[Json] | None
    answers: list[Call]
    played: bool = False


@dataclass(frozen=True)
class Difference:
    """The first difference between an agent and its record: `what` in a sentence, at number `call`,
    from 1, of the calls that were played; `diff`: recorded and current, may be empty."""

    call: int
    what: str
    diff: list[str] = field(default_factory=list)


def recorded_calls(calls: Sequence[Call], rollout_id: str, agents: Sequence[str]) -> list[Exchange]:
    exchanges: list[Exchange] = []
    for call in calls:
        line = routing_key(rollout_id, call.agent if call.agent in agents else None)
        if call.delivered == "none":
            continue  # no client received this answer
        if call.choice:
            exchanges[-1].answers.append(call)
            continue
        messages = call.messages if call.dialect != "completions" else None
        exchanges.append(Exchange(line, messages, call.tools, [call]))
    return exchanges


def calls_from(messages: Sequence[Message], turns: int, line: str) -> list[Exchange]:
    """Reconstructs calls that were not kept from a conversation: the last `turns` messages of the
    assistant are their answers."""
    places = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
    if len(places) < turns:
        raise InputError(
            f"The record has {len(places)} of {turns} calls: the agent did not only append to its "
            "conversation.",
            hint="Rollouts made with --tokens.keep_calls true can always be replayed.",
        )
    sampled = places[len(places) - turns :] if turns else []
    return [
        Exchange(line, list(messages[:at]), None, [_answer(messages[at], number)])
        for number, at in enumerate(sampled)
    ]


def _answer(message: Message, number: int) -> Call:
    none = np.empty(0, np.int32)
    return Call(
        index=number,
        model="",
        prompt_ids=none,
        completion_ids=none,
        logprobs=np.empty(0, np.float32),
        versions=[],
        exact=False,
        finish_reason="tool_calls" if message.get("tool_calls") else "stop",
        message=message,
        messages=[],
    )


class Player:
    """An Engine that plays `exchanges`. `exact`: the record has ids and logprobs of every call."""

    kind = "replay"

    def __init__(self, exchanges: Sequence[Exchange], *, model: str, exact: bool) -> None:
        self.exact = exact
        self.difference: Difference | None = None
        self.played = 0
        self._exchanges = list(exchanges)
        self._model = model

    @property
    def left(self) -> int:
        return sum(not exchange.played for exchange in self._exchanges)

    def differ(self, what: str, diff: Sequence[str] = ()) -> Difference:
        """Notes a difference; the first one counts."""
        if self.difference is None:
            self.difference = Difference(self.played + 1, what, list(diff))
        return self.difference

    async def __aenter__(self) -> Player:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def model_name(self) -> str:
        return self._model

    async def health(self) -> list[ReplicaHealth]:
        return self.replicas()

    def replicas(self) -> list[ReplicaHealth]:
        return [ReplicaHealth("the record", healthy=True)]

    async def get(self, path: str) -> Json:
        return {"object": "list", "data": [{"id": self._model, "object": "model"}]}

    async def post(self, request: EngineRequest) -> Json:
        exchange = self._next(request.body, request.rollout_id)
        is_chat = request.path.endswith("/chat/completions")
        first = exchange.answers[0]
        answer = {
            "id": f"replay-{self.played}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(first.started_at),
            "model": first.served_model or self._model,
            "choices": [_choice(call, is_chat) for call in exchange.answers],
            "usage": _usage(exchange.answers),
        }
        if self.exact and is_chat:
            answer["prompt_token_ids"] = first.prompt_ids.tolist()
        return answer

    @asynccontextmanager
    async def stream(self, request: EngineRequest) -> AsyncIterator[AsyncIterator[Json]]:
        yield _chunks(await self.post(request))

    def _next(self, body: Json, line: str) -> Exchange:
        """Returns the exchange that `body` requests; concurrent calls each find their own."""
        if self.difference is not None:
            raise _over(self.difference)
        waiting = [
            exchange
            for exchange in self._exchanges
            if not exchange.played and exchange.line == line
        ]
        if not waiting:
            who = line.rpartition("/")[2] if "/" in line else "the agent"
            last = [f"+{line}" for line in _spoken((body.get("messages") or [])[-1:])]
            raise _over(self.differ(f"The record ends here, but {who} makes another call.", last))
        found = next((exchange for exchange in waiting if not _differs(exchange, body)), None)
        if found is None:
            raise _over(self.differ(*_compared(waiting[0], body)))
        found.played = True
        self.played += 1
        return found


class RecordedServices(Services):
    """Services that answer from the record; any other request is a difference."""

    def __init__(self, calls: Sequence[ServiceCall], player: Player) -> None:
        super().__init__({})
        self._left = list(calls)
        self._player = player

    def __bool__(self) -> bool:
        return True  # although no name is listed

    def get(self, name: str, default: Any = None) -> Service:
        """Returns a service for every name; a name missing in the record counts as a difference."""
        return functools.partial(self._answer, name)

    async def _answer(self, name: str, arguments: Json, caller: Caller) -> Any:
        for at, call in enumerate(self._left):
            if call.name == name and call.arguments == arguments:
                del self._left[at]
                if call.refused:
                    raise InputError(call.refused)
                return call.answer
        then = next((call.arguments for call in self._left if call.name == name), None)
        what = f"The service {name!r} did not get this request in the record."
        diff = _diff(_lines(then) if then is not None else [], _lines(arguments))
        raise ServiceError(self._player.differ(what, diff).what)


def _choice(call: Call, is_chat: bool) -> Json:
    message = {"role": "assistant", **call.engine_message}
    said = {"message": message} if is_chat else {"text": message.get("content") or ""}
    choice: Json = {
        "index": call.choice,
        **said,
        "finish_reason": call.finish_reason,
        "stop_reason": call.stop_reason,
        "logprobs": None,
    }
    if call.exact:
        logprobs = call.logprobs.tolist()
        names = [f"token_id:{token}" for token in call.completion_ids.tolist()]
        entries = [
            {"token": name, "logprob": logprob, "bytes": None, "top_logprobs": []}
            for name, logprob in zip(names, logprobs, strict=True)
        ]
        texts = {"tokens": names, "token_logprobs": logprobs, "top_logprobs": None}
        choice["logprobs"] = {"content": entries} if is_chat else {**texts, "text_offset": []}
        choice["token_ids"] = call.completion_ids.tolist()
        if not is_chat:
            choice["prompt_token_ids"] = call.prompt_ids.tolist()
    return choice


def _usage(answers: Sequence[Call]) -> Json:
    prompt = len(answers[0].prompt_ids)
    completion = sum(len(call.completion_ids) for call in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


async def _chunks(answer: Json) -> AsyncIterator[Json]:
    shared = {key: answer[key] for key in ("id", "created", "model")}
    shared["object"] = "chat.completion.chunk"
    ids = {key: answer[key] for key in ("prompt_token_ids",) if key in answer}
    for choice in answer["choices"]:
        part = {key: value for key, value in choice.items() if key != "message"}
        if "message" in choice:
            part["delta"] = choice["message"]
        yield {**shared, **ids, "choices": [part]}
    yield {**shared, "choices": [], "usage": answer["usage"]}


def _differs(exchange: Exchange, body: Json) -> bool:
    if exchange.messages is not None and exchange.messages != body.get("messages"):
        return True
    return exchange.tools is not None and exchange.tools != (body.get("tools") or [])


def _compared(exchange: Exchange, body: Json) -> tuple[str, list[str]]:
    then, now = exchange.messages or [], body.get("messages") or []
    if exchange.messages is None or then == now:
        diff = _diff(_lines(exchange.tools), _lines(body.get("tools") or []))
        return "The agent offers other tools than in the record.", diff
    pairs = zip(then, now, strict=False)
    at = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(then), len(now)))
    what = (
        f"The agent sends {len(now)} messages, the record has {len(then)}; message {at + 1} is "
        "the first that differs."
    )
    return what, _diff(_spoken(then[at:]), _spoken(now[at:]))


def _spoken(messages: Sequence[Message]) -> list[str]:
    lines: list[str] = []
    for message in messages:
        lines.append(f"[{message.get('role')}]")
        content = message.get("content")
        lines += content.splitlines() if isinstance(content, str) else _lines(content)
        rest = {key: value for key, value in message.items() if key not in ("role", "content")}
        lines += _lines(rest) if rest else []
    return lines


def _lines(value: Any) -> list[str]:
    return json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True).splitlines()


def _diff(then: Sequence[str], now: Sequence[str]) -> list[str]:
    lines: Iterator[str] = difflib.unified_diff(
        then, now, "then", "now", n=_CONTEXT_LINES, lineterm=""
    )
    return [line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} ..." for line in lines]


def _over(difference: Difference) -> EngineRefused:
    return EngineRefused(f"The replay differs from its record. {difference.what}", status=400)


def agents_of(rollout: Mapping[str, Any], group: Mapping[str, Any]) -> list[str]:
    return list((group.get("rendering") or {}).get("agents") or {})


# A call that continues an earlier one holds only what is new in it (see `tokens.trace`), so what is
# written grows as what was said does.


def kept_calls(trajectory: Trajectory) -> dict[str, Any]:
    """`{"calls", "service_calls"}` of `trajectory`, plain JSON without routed experts."""
    calls = [replace(call, new=replace(call.new, experts=None)) for call in trajectory.calls]
    return {
        "calls": msgspec.to_builtins(calls, enc_hook=_as_list),
        "service_calls": msgspec.to_builtins(trajectory.service_calls),
    }


def calls_in(kept: Mapping[str, Any]) -> list[Call]:
    try:
        traced = msgspec.convert(kept.get("calls") or [], list[TracedCall], dec_hook=_as_array)
        return unpack_calls(traced)
    except (msgspec.ValidationError, TokensError, ValueError, OverflowError) as error:
        raise InputError(f"The record of its calls is damaged: {error}") from error


def service_calls_in(kept: Mapping[str, Any]) -> list[ServiceCall]:
    try:
        return msgspec.convert(kept.get("service_calls") or [], list[ServiceCall])
    except msgspec.ValidationError as error:
        raise InputError(f"The record of its services is damaged: {error}") from error


def _as_list(value: object) -> list[Any]:
    if isinstance(value, np.ndarray):
        return list(value.tolist())
    raise NotImplementedError(f"{type(value).__name__} is not JSON")


def _as_array(kind: type, value: Any) -> Any:
    element = np.float32 if np.dtype(np.float32) in _element(kind) else np.int32
    return np.asarray(value, dtype=element)


def _element(kind: Any) -> tuple[Any, ...]:
    return tuple(
        np.dtype(scalar)
        for argument in getattr(kind, "__args__", ())
        for scalar in getattr(argument, "__args__", ())
        if isinstance(scalar, type)
    )
