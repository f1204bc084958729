"""A person who plays the model: an engine whose answers are typed by hand.

In: requests to the model. Out: what the person answers, with the simulated engine's tokens. What
always holds: one request is shown at a time; while the person types, the event loop goes on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
from envserver_records.errors import EngineRefused
from envserver_records.records import Message

from ..config import SimConfig
from ..models.sim import SimEngine
from ..models.sim.conversation import Conversation
from ..models.sim.faulty_answers import Said
from ..models.sim.policy import Wish
from ..models.sim.tokenizer import assistant_text, canonical_arguments

PERSON = "sim"
"""The model's name: the tokens are those of the simulated engine."""


class Asked(msgspec.Struct, frozen=True):
    """A request to the person.

    Args:
        line: the rollout, with its agent where there are several.
        messages: the conversation.
        tools: in OpenAI's format.
    """

    line: str
    messages: list[Message]
    tools: list[dict[str, Any]]


Answer = Callable[[Asked], Message | None]
"""Returns the assistant's message; None: the person has left. May block."""


class PersonEngine(SimEngine):
    """See the module."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(SimConfig(latency_seconds=0.0), speaker=self)
        self._answer = answer
        self._one_at_a_time = asyncio.Lock()
        self._said: dict[str, str] = {}

    def say(self, conversation: Conversation, wish: Wish, *, fate: str, key: str) -> Said:
        """See Speaker."""
        return Said(self._said[wish.rollout_id])

    async def post(
        self,
        path: str,
        body: dict[str, Any],
        *,
        rollout_id: str,
        timeout_seconds: float,
        form: type | None = None,
    ) -> dict[str, Any]:
        """See Engine; the time in which the person thinks does not count."""
        await self._ask(body, rollout_id)
        return await super().post(
            path, body, rollout_id=rollout_id, timeout_seconds=timeout_seconds, form=form
        )

    @asynccontextmanager
    async def stream(
        self,
        path: str,
        body: dict[str, Any],
        *,
        rollout_id: str,
        timeout_seconds: float,
        form: type | None = None,
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """See Engine."""
        await self._ask(body, rollout_id)
        async with super().stream(
            path, body, rollout_id=rollout_id, timeout_seconds=timeout_seconds, form=form
        ) as chunks:
            yield chunks

    async def _ask(self, body: dict[str, Any], rollout_id: str) -> None:
        asked = Asked(rollout_id, body.get("messages") or [], body.get("tools") or [])
        async with self._one_at_a_time:
            message = await _in_daemon_thread(lambda: self._answer(asked))
        if message is None:
            raise EngineRefused("The person who plays the model has left.", status=400)
        self._said[rollout_id] = assistant_text(_canonical(message))


def _canonical(message: Message) -> Message:
    """Returns the message with canonical arguments; what is no JSON stays as it was typed."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call["function"])
        with suppress(ValueError):
            function["arguments"] = canonical_arguments(function["arguments"])
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


async def _in_daemon_thread(work: Callable[[], Message | None]) -> Message | None:
    """Runs `work` in a thread that nobody waits for at the end: it may wait for a key forever."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Message | None] = loop.create_future()

    def give(value: Message | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(value)

    def run() -> None:
        value, failure = None, None
        try:
            value = work()
        except Exception as error:  # noqa: BLE001 - handed over to the one who awaits it
            failure = error
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(give, value, failure)

    threading.Thread(target=run, name="person", daemon=True).start()
    return await done
