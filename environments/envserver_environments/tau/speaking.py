"""One side of a conversation: it hears messages, receives its calls' results, and speaks.

Assistant and customer differ only in their prompts, their tools and the agent name of their model's
calls (`run.chat(..., agent=name)`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from envserver_tools.visible import visible_text

from envserver import Message, Reply, Rollout, ServiceError

from .tasks import TauMessage
from .wire import calls_of, result_for_model

MAX_EMPTY_ANSWERS = 3
"""After this many unusable answers at a turn a customer's model is an infrastructure failure."""


@dataclass(frozen=True)
class Utterance:
    """The output of a side's turn: a text, or calls (`{"id", "name", "arguments"}`).

    Args:
        cut_off: the message is incomplete; neither text nor calls count.
        dropped_words: there was text beside the calls, which nobody hears.
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
