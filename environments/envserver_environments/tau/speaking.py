"""One side of a conversation: who hears, is told what his calls gave, and says something.

Assistant and customer are told apart only by their prompts, their tools and the name under which
their model is asked (`run.chat(..., agent=name)`).
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
"""So often a customer's model may say nothing usable at a turn, before that is our failure."""


@dataclass(frozen=True)
class Utterance:
    """What a side says at its turn: words, or calls (`{"id", "name", "arguments"}`).

    Args:
        cut_off: its message has no end; neither words nor calls count.
        dropped_words: there were words beside the calls, which nobody hears.
    """

    content: str | None = None
    calls: Sequence[dict[str, Any]] = ()
    cut_off: bool = False
    dropped_words: bool = False


class Speaker(Protocol):
    """A side. After each `speak` it is told results where it made calls."""

    def hear(self, content: str) -> None:
        """The other side said something."""

    def receive(self, results: Sequence[TauMessage]) -> None:
        """What its calls gave."""

    async def speak(self) -> Utterance:
        """What it says now."""


@dataclass
class ModelSpeaker:
    """A side that is a model. Its conversation only grows, so it is one training sequence.

    Args:
        name: of the agent of the rollout.
        system: its system prompt.
        tools: in OpenAI's shape; empty: it has none.
        history: what was said before, as it sees it.
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
        """
        Raises:
            ServiceError: his model gives nothing usable, again and again.
        """
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
    """What a model's answer says aloud: thoughts are not heard, nor words beside calls."""
    if reply.finish_reason == "length":
        return Utterance(cut_off=True)
    words = visible_text(reply.content)
    if reply.tool_calls:
        spoken = bool(words and words.strip())
        return Utterance(calls=calls_of(reply.tool_calls), dropped_words=spoken)
    return Utterance(words.strip() if words else None)
