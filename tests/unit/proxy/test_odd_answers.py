"""A wrong answer of an engine is a typed error, or is recorded as not exact."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from support.fake_scale_out import ScaleOut
from support.proxy_house import asgi_post
from support.serving import attempt_spec
from support.templates import OWN, chat_format, user

from envserver.models import ProbeResult
from envserver.models.probe import EngineMode
from envserver.proxy import EngineEndpoint, Proxy, ProxyAttempt
from envserver.proxy.capabilities import Capabilities
from envserver.tokens import ChatFormat

Json = dict[str, Any]
Spoil = Callable[[Json], None]
BIG = 2**70
GENERATE, COMPLETIONS, CHAT = "/generate", "v1/completions", "/chat/completions"
ALL: Json = {"logprobs": True, "return_token_ids": True}
TOOLS: Json = {"tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}]}
TURNS = [
    [user("hi")],
    [user("hi"), {"role": "assistant", "content": "Hello."}, user("more")],
]


@cache
def format() -> ChatFormat:
    return chat_format(OWN["chatml"])


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


class Asked:
    """An attempt whose calls an engine in `mode` answers; what the agent hears is in `heard`."""

    def __init__(self, mode: EngineMode, path: str, spoil: Spoil, text: str = "Hello.") -> None:
        def spoiled(asked: str, answer: Json) -> None:
            if asked.endswith(path):
                spoil(answer)

        engine = ScaleOut(format(), text, spoil=spoiled)
        probe_result = ProbeResult(mode=mode, model="tiny", tools=True)

        async def find() -> Capabilities:
            return Capabilities(probe_result=probe_result, format=format())

        self.proxy = Proxy(engine, endpoint=EngineEndpoint(engine, find=find))
        self.attempt: ProxyAttempt = self.proxy.open(attempt_spec())
        self.heard = b""

    async def post(self, turn: int = 0, **fields: Any) -> None:
        async def hear(message: Any) -> None:
            self.heard += message.get("body", b"")

        body = {"model": "m", "messages": TURNS[turn], **fields}
        await asgi_post(self.proxy, self.attempt.key, body, hear)

    def check(self, *, failed: bool) -> None:
        """Nothing is called exact and delivered, and an error is the engine's."""
        assert (b'"engine_garbage"' in self.heard) == failed
        assert self.attempt.engine_failures == failed
        calls = self.attempt.calls
        assert not any(call.exact and call.delivered == "full" for call in calls)
        assert failed or [call.delivered for call in calls] == ["full"]


def each_choice(**fields: Any) -> Spoil:
    def spoil(answer: Json) -> None:
        for choice in answer["choices"]:
            choice.update(fields)

    return spoil


def first_id(value: Any) -> Spoil:
    def spoil(answer: Json) -> None:
        for choice in answer["choices"]:
            choice["token_ids"][0] = value

    return spoil


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wanted", [{}, ALL])
@pytest.mark.parametrize(
    ("spoil", "failed"),
    [
        (first_id(BIG), False),
        (first_id(-1), False),
        (first_id(1.0), False),
        (each_choice(stop_reason=BIG), True),
        (each_choice(finish_reason=BIG), True),
        (each_choice(index=BIG), True),
        (each_choice(index=1), True),
        (each_choice(text="\ud800"), True),
        (lambda answer: answer.update(request_id=deep(300)), True),
    ],
)
async def test_numbers_that_are_no_ids_and_what_cannot_be_written_again(
    spoil: Spoil, failed: bool, wanted: Json, stream: bool
) -> None:
    asked = Asked("tokens", GENERATE, spoil)
    await asked.post(stream=stream, **wanted)
    asked.check(failed=failed)


@pytest.mark.parametrize("field", ["created", "usage"])
async def test_a_large_number_that_nobody_needs_spoils_no_answer(field: str) -> None:
    value = BIG if field == "created" else {"x": BIG}
    asked = Asked("tokens", GENERATE, lambda answer: answer.update({field: value}))
    await asked.post()
    (call,) = asked.attempt.calls
    assert call.exact
    assert call.delivered == "full"


@pytest.mark.parametrize("path", [GENERATE, "/render"])
@pytest.mark.parametrize("value", [BIG, -1, "x", True])
async def test_what_is_not_an_id_is_not_sent_to_the_engine_again(path: str, value: Any) -> None:
    def spoil(answer: Json) -> None:
        holder = answer["choices"][0] if "choices" in answer else answer
        holder["token_ids"][0] = value

    asked = Asked("tokens", path, spoil)
    await asked.post(**TOOLS)
    asked.check(failed=True)


@pytest.mark.parametrize("place", ["answer", "message", "error"])
async def test_an_answer_that_nests_too_deeply_is_the_engines_fault(place: str) -> None:
    def spoil(answer: Json) -> None:
        holder = answer["choices"][0]["message"] if place == "message" else answer
        holder["error" if place == "error" else "x"] = deep(300)

    asked = Asked("chat", CHAT, spoil)
    await asked.post()
    asked.check(failed=True)


def logprobs(**fields: Any) -> Spoil:
    """Puts functions of the lists in completions' logprobs in their places."""

    def spoil(answer: Json) -> None:
        for choice in answer["choices"]:
            held = choice["logprobs"] or {}
            held |= {name: change(held[name]) for name, change in fields.items() if name in held}

    return spoil


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "spoil",
    [
        logprobs(top_logprobs=lambda _: 5),
        logprobs(top_logprobs=lambda tops: ["x"] * len(tops)),
        logprobs(top_logprobs=lambda tops: [*tops, {}]),
        logprobs(token_logprobs=lambda values: [*values, -1.0]),
        logprobs(token_logprobs=lambda values: ["x"] * len(values)),
        logprobs(tokens=lambda tokens: [None] * len(tokens)),
        logprobs(tokens=lambda tokens: ["token_id:5"] * len(tokens)),
        logprobs(tokens=lambda tokens: ["token_id:" + "9" * 5000] * len(tokens)),
    ],
)
async def test_logprobs_of_a_completion_that_are_not_those_of_its_tokens(
    spoil: Spoil, stream: bool
) -> None:
    asked = Asked("completions", COMPLETIONS, spoil)
    await asked.post()
    asked.heard = b""
    (first,) = asked.attempt.calls
    assert first.exact
    await asked.post(1, stream=stream)
    assert b'"engine_garbage"' in asked.heard
    assert [call.delivered for call in asked.attempt.calls[1:]] == ["none"] * stream


# Streams


def at(place: int, **fields: Any) -> Spoil:
    """Changes the choice in one chunk of a stream."""
    seen: list[Json] = []

    def spoil(chunk: Json) -> None:
        seen.append(chunk)
        if len(seen) == place + 1:
            chunk["choices"][0].update(fields)

    return spoil


@pytest.mark.parametrize("spoil", [at(2, finish_reason="stop"), at(5, finish_reason="length")])
async def test_a_choice_that_goes_on_after_its_end_is_the_engines_fault(spoil: Spoil) -> None:
    asked = Asked("tokens", GENERATE, spoil)
    await asked.post(stream=True)
    asked.check(failed=True)


async def test_an_empty_finish_reason_is_no_end() -> None:
    asked = Asked("tokens", GENERATE, each_choice(finish_reason=""))
    await asked.post(stream=True)
    asked.check(failed=True)
    asked = Asked("tokens", GENERATE, at(2, finish_reason=""))
    await asked.post(stream=True)
    assert asked.attempt.calls[0].exact
