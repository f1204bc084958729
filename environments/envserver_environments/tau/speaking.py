"""One side of a conversation: it hears messages, receives its calls' results, and speaks.

Assistant and customer differ only in their prompts, their tools and the agent name of their model's
calls (`run.chat(..., agent=name)`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from envserver_tools.calling import Tool
from envserver_tools.protocol import RESULT_HEAD, Part, describe_tools, parse_message
from envserver_tools.visible import visible_text

from envserver import Message, Reply, Rollout, ServiceError

from .prompts import text_prompt
from .tasks import TauMessage
from .wire import calls_of, result_for_model

MAX_EMPTY_ANSWERS = 3
"""After this many unusable answers at a turn a customer's model is an infrastructure failure."""


@dataclass(frozen=True)
class Utterance:
    """The output of a side's turn: a text, or calls (`{"id", "name", "arguments"}`).

    Args:
        cut_off: the message is incomplete; neither text nor calls count.
        dropped_words: there was text beside the calls; it was dropped.
    """

    content: str | None = None
    calls: Sequence[dict[str, Any]] = ()
    cut_off: bool = False
    dropped_words: bool = False


class Speaker(Protocol):
    """One side. After a `speak` with calls it receives their results."""

    def hear(self, content: str) -> None:
        """Takes a message of the other side."""

    def receive(self, results: Sequence[TauMessage]) -> None:
        """Takes the results of its calls."""

    async def speak(self) -> Utterance:
        """Returns its next utterance."""


@dataclass
class ModelSpeaker:
    """A side played by a model. Its conversation is append-only, so it is one training sequence.

    Args:
        name: of the agent of the rollout.
        system: its system prompt.
        tools: in OpenAI's form; empty: it has none.
        history: the earlier conversation, as this side sees it.
    """

    run: Rollout
    name: str
    system: str
    tools: list[dict[str, Any]] = field(default_factory=list)
    history: Iterable[Message] = ()

    def __post_init__(self) -> None:
        self._messages: list[Message] = [
            {"role": "system", "content": self.system},
            *self.history,
        ]

    def hear(self, content: str) -> None:
        self._messages.append({"role": "user", "content": content})

    def receive(self, results: Sequence[TauMessage]) -> None:
        self._messages += map(result_for_model, results)

    async def speak(self) -> Utterance:
        reply = await self._asked()
        self._messages.append(reply.message)
        return utterance_of(reply)

    async def _asked(self) -> Reply:
        return await self.run.chat(self._messages, agent=self.name, tools=self.tools or None)


class ModelCustomer(ModelSpeaker):
    """A customer who is a model: that it says nothing is not the assistant's doing."""

    async def speak(self) -> Utterance:
        """Raises ServiceError: his model gives nothing usable, again and again."""
        for _ in range(MAX_EMPTY_ANSWERS):
            reply = await self._asked()
            utterance = utterance_of(reply)
            if utterance.content or utterance.calls:
                self._messages.append(reply.message)
                return utterance
        raise ServiceError(
            f"The customer's model gave no usable answer {MAX_EMPTY_ANSWERS} times in a row.",
            hint="See --env.agents.user.model_name and --env.agents.user.max_tokens.",
        )


def utterance_of(reply: Reply) -> Utterance:
    """Returns the audible part of a model's answer: no thoughts, and no text beside calls."""
    if reply.finish_reason == "length":
        return Utterance(cut_off=True)
    words = visible_text(reply.content)
    if reply.tool_calls:
        spoken = bool(words and words.strip())
        return Utterance(calls=calls_of(reply.tool_calls), dropped_words=spoken)
    return Utterance(words.strip() if words else None)


# For models without native tool calls. FINAL holds the text for the customer; one call a message.

MAX_UNUSABLE = 3
"""After this many messages without a call or text in a row, the utterance is empty."""


class TextSpeaker(ModelSpeaker):
    """A side that is a model without tool calls."""

    def __post_init__(self) -> None:
        listed = describe_tools(Tool(tool, _not_here) for tool in self.tools)
        self.system = f"{self.system}\n\n{text_prompt()}\n{listed}"
        self.history = list(_in_text(self.history))
        self.tools = []
        super().__post_init__()
        self._calls = 0

    def receive(self, results: Sequence[TauMessage]) -> None:
        told = "\n".join(str(result["content"]) for result in results)
        self.hear(f"{RESULT_HEAD}\n{told}")

    async def speak(self) -> Utterance:
        for _ in range(MAX_UNUSABLE):
            reply = await self.run.chat(self._messages, agent=self.name, stop=[RESULT_HEAD])
            self._messages.append(reply.message)
            if reply.finish_reason == "length":
                return Utterance(cut_off=True)
            parts = parse_message(reply.content)
            utterance = self._utterance(parts)
            if utterance is not None:
                return utterance
            self.hear(_correction(parts[-1]))
        return Utterance()

    def _utterance(self, parts: Sequence[Part]) -> Utterance | None:
        for part in parts:
            if part.type == "final":
                return Utterance(part.text.strip())
            if part.type == "tool_call":
                self._calls += 1
                call = {"id": f"text_{self._calls}", "name": part.tool, "arguments": part.args}
                return Utterance(calls=[call])
        return None


def as_texts(turns: Iterable[Message]) -> Iterator[Message]:
    """Converts messages with tool calls to texts of a model that has none."""
    for turn in turns:
        for call in turn.get("tool_calls") or ():
            function = call["function"]
            made = {"tool": function["name"], "args": json.loads(function["arguments"])}
            yield {"role": "assistant", "content": f"TOOL_CALL: {json.dumps(made)}"}
        if turn.get("content"):
            yield {"role": "assistant", "content": f"FINAL: {turn['content']}"}


def _in_text(history: Iterable[Message]) -> Iterator[Message]:
    for message in history:
        if message["role"] == "assistant":
            yield from as_texts([message])
        elif message["role"] == "tool":
            yield {"role": "user", "content": f"{RESULT_HEAD}\n{message['content']}"}
        else:
            yield message


def _correction(part: Part) -> str:
    if part.type == "error":
        return f"Error: {part.text} Write TOOL_CALL: or FINAL: as you were told."
    return "Go on: call a tool (TOOL_CALL:), or write to the customer (FINAL:)."


def _not_here(**arguments: object) -> str:
    raise AssertionError("tools are called in the world")
