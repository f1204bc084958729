"""Official clients and agent frameworks on a real vLLM: what each does to a talk when it sends it
back, that every call is recorded as the engine sampled it, and that a talk is one sequence.

Its random model is held to a form where an answer has to mean something.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from support.relay import relay
from support.sdk_house import SdkHouse, Seat, vllm_house, whole_and_streamed
from support.vllm_server import VllmServer

pytestmark = pytest.mark.vllm

TURNS = 3
SEED = {"seed": 5}
SCHEMA: Any = {
    "type": "object",
    "properties": {"loud": {"type": "boolean"}},
    "required": ["loud"],
    "additionalProperties": False,
}
RING: Any = {"name": "ring", "description": "Rings.", "strict": True}
FORCED: Any = {
    "tools": [{"type": "function", "function": RING | {"parameters": SCHEMA}}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}
WORDS = {"structured_outputs": {"regex": "[a-z]{3,9} [a-z]{3,9}"}}


class Engine:
    """A proxy before the engine, and what the engine itself said to it."""

    def __init__(self, house: SdkHouse, echoes: Iterable[Any]) -> None:
        self._house = house
        self._echoes = echoes

    @contextmanager
    def seat(self, edges: list[str], sequences: int = 1) -> Iterator[Seat]:
        """An attempt; its calls have to continue one another by `edges`.

        An edge "exact" is one where the client changed nothing; where what was sampled cannot be
        told as text it is "lossy_detok".
        """
        with self._house.seat() as seat:
            yield seat
        seat.assert_exact()
        assert [edge.replace("lossy_detok", "exact") for edge in seat.edges] == edges
        assert len(seat.sequences) == sequences
        recorded = (_key(c.prompt_ids, c.completion_ids, c.logprobs) for c in seat.calls)
        echoed = (_key(e.prompt_ids, e.completion_ids, e.logprobs) for e in self._echoes)
        assert Counter(recorded) <= Counter(echoed)


def _key(*arrays: Any) -> bytes:
    return b"|".join(np.asarray(array, np.float32).tobytes() for array in arrays)


@pytest.fixture(scope="module")
def engine(vllm_server: VllmServer) -> Iterator[Engine]:
    with (
        relay(vllm_server.root_url) as (url, echoes),
        vllm_house(f"{url}/v1", vllm_server.model) as house,
    ):
        yield Engine(house, echoes)


def user(text: str = "Tell me of Ann.") -> dict[str, Any]:
    return {"role": "user", "content": text}


# OpenAI's client


def completion(seat: Seat, streamed: bool, **asked: Any) -> Any:
    """A chat completion, whole or as the client's helper puts it together from a stream."""
    chats = seat.openai.chat.completions
    if not streamed:
        return chats.create(model=seat.model, **asked, **SEED)
    with chats.stream(model=seat.model, **asked, **SEED) as stream:
        return stream.get_final_completion()


@whole_and_streamed
def test_openai_chat(engine: Engine, streamed: bool) -> None:
    with engine.seat(["root", "exact", "exact"]) as seat:
        messages: list[Any] = [user()]
        for _ in range(TURNS):
            asked: Any = {"logprobs": True, "top_logprobs": 2, "extra_body": WORDS}
            (choice,) = completion(seat, streamed, messages=messages, **asked).choices
            assert choice.finish_reason == "stop"
            told = [entry.logprob for entry in choice.logprobs.content]
            assert np.float32(told).tolist() == seat.calls[-1].logprobs.tolist()
            assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
            messages += [choice.message, user("And then?")]


@whole_and_streamed
def test_openai_tools(engine: Engine, streamed: bool) -> None:
    with engine.seat(["root", "calls", "calls"]) as seat:
        messages: list[Any] = [user()]
        for _ in range(TURNS):
            message = completion(seat, streamed, messages=messages, **FORCED).choices[0].message
            (made,) = message.tool_calls
            assert made.function.arguments in ('{"loud": true}', '{"loud": false}')
            messages += [message, {"role": "tool", "tool_call_id": made.id, "content": "Ding."}]


def test_openai_goes_on_from_one_of_several_choices(engine: Engine) -> None:
    with engine.seat(["root"] * 3 + ["exact"], sequences=3) as seat:
        chats = seat.openai.chat.completions
        asked: Any = {"model": seat.model, "max_tokens": 9, **SEED}
        chosen = chats.create(messages=[user()], n=3, **asked).choices[1].message
        chats.create(messages=[user(), chosen, user("And then?")], **asked)
        assert seat.calls[3].planned_parent == 1


@pytest.mark.parametrize("by_id", [False, True])
@whole_and_streamed
def test_openai_responses(engine: Engine, streamed: bool, by_id: bool) -> None:
    with engine.seat(["root", "exact", "exact"]) as seat:
        asked: Any = {"model": seat.model, "max_output_tokens": 9, "extra_body": SEED}
        items: list[Any] = [user()]
        for _ in range(TURNS):
            answer: Any = seat.openai.responses.create(input=items, stream=streamed, **asked)
            if streamed:
                *_, last = answer
                answer = last.response
            assert answer.usage.output_tokens == len(seat.calls[-1].completion_ids)
            if by_id:
                asked["previous_response_id"] = answer.id
                items = [user("And then?")]
            else:
                items += [*answer.output, user("And then?")]


# Anthropic's client


@pytest.mark.parametrize("tools", [False, True])
@whole_and_streamed
def test_anthropic(engine: Engine, streamed: bool, tools: bool) -> None:
    edge = "calls" if tools else "exact"
    with engine.seat(["root", edge, edge]) as seat:
        asked: Any = {"model": seat.model, "max_tokens": 60 if tools else 9, "extra_body": SEED}
        if tools:
            asked["tools"] = [RING | {"input_schema": SCHEMA}]
            asked["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
        messages: list[Any] = [user()]
        for _ in range(TURNS):
            if streamed:
                with seat.anthropic.messages.stream(messages=messages, **asked) as stream:
                    answer = stream.get_final_message()
            else:
                answer = seat.anthropic.messages.create(messages=messages, **asked)
            assert answer.usage.output_tokens == len(seat.calls[-1].completion_ids)
            (block,) = answer.content
            messages.append({"role": "assistant", "content": answer.content})
            if tools:
                result = {"type": "tool_result", "tool_use_id": block.id, "content": "Ding."}
                messages.append({"role": "user", "content": [result]})
            else:
                messages.append(user("And then?"))


# Agent frameworks
