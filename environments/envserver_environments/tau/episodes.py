"""The course of a conversation as a state machine without models: turns and the end.

Live conversations and replays drive it. As in tau2-bench (src/tau2/orchestrator/orchestrator.py) a
message with calls goes to the tools and their results return to the caller; any other goes to the
other side. Every message, and every round of tools, is a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from envserver_records.tasks import Json

from .domains.toolkit import Requestor, with_whole_numbers
from .domains.world import Domain
from .tasks import TauMessage, TauTask, has_text, start

GREETING = "Hi! How can I help you today?"
"""The assistant's first message if a task has no message history (tau2-bench's words)."""

STOP, TRANSFER, OUT_OF_SCOPE = "###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###"

Ending = Literal[
    "user_stop", "agent_stop", "max_steps", "too_many_errors", "agent_error", "user_error"
]
COMPLETE: frozenset[Ending] = frozenset({"user_stop", "agent_stop"})
"""Endings that are scored; after any other the reward is 0."""


@dataclass(frozen=True)
class EpisodeRules:
    """Conditions that end a conversation early."""

    max_steps: int = 100  # messages and rounds of tools
    max_errors: int = 10  # failed calls of both sides together
    validate: bool = False  # text together with calls ends it (agent_error or user_error)
    agent_may_stop: bool = False  # the assistant ends it by the stop token, as the customer does
    whole_numbers: bool = False  # 2.0 for an integer argument becomes 2, unlike in tau2-bench


class Episode:
    """One conversation about `task`."""

    def __init__(self, domain: Domain, task: TauTask, rules: EpisodeRules | None = None) -> None:
        self.task = task
        self.rules = rules or EpisodeRules()
        self.world = start(domain, task)
        self.messages: list[TauMessage] = task.history
        self.steps = 0
        self.errors = 0
        self.ending: Ending | None = None
        self._next: Requestor = "user"
        if not self.messages:
            self.messages.append({"role": "assistant", "content": GREETING})
        else:
            self._resume(self.messages[-1])

    @property
    def speaker(self) -> Requestor | None:
        return None if self.ending else self._next

    def say(self, content: str | None, tool_calls: Sequence[Json] = ()) -> list[TauMessage]:
        """Takes the message of the side whose turn it is; returns the results of its calls, in
        order. Arguments that are not an object give an error to the caller."""
        if self.ending is not None:
            raise RuntimeError("The conversation is over.")
        message: TauMessage = {"role": self._next, "content": content}
        if tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.get("id", ""),
                    "name": call["name"],
                    "arguments": self._arguments(call["name"], call["arguments"]),
                    "requestor": self._next,
                }
                for call in tool_calls
            ]
        self.messages.append(message)
        self.ending = self._ending_by(message)
        self.steps += 1
        self.world.sync()
        if not tool_calls:
            self._next = "user" if self._next == "assistant" else "assistant"
            self._check_limits()
            return []
        return [] if self.ending else self._run_calls(message)

    def _arguments(self, name: str, arguments: Any) -> Any:
        tool = self.world.tool(name)
        if tool is None or not self.rules.whole_numbers or not isinstance(arguments, Mapping):
            return arguments
        return with_whole_numbers(tool, arguments)

    def _run_calls(self, message: TauMessage) -> list[TauMessage]:
        results = []
        for call in message["tool_calls"]:
            result = self.world.call(call["requestor"], call["name"], call["arguments"])
            self.errors += result.error
            results.append(
                {
                    "role": "tool",
                    "id": call["id"],
                    "requestor": call["requestor"],
                    "content": result.content,
                    "error": result.error,
                }
            )
        self.messages += results
        self.steps += 1
        self._check_limits()
        return results

    def _ending_by(self, message: TauMessage) -> Ending | None:
        by_agent = message["role"] == "assistant"
        calls = bool(message.get("tool_calls"))
        if has_text(message) == calls and (self.rules.validate or not calls):
            return "agent_error" if by_agent else "user_error"
        if by_agent:
            stops = self.rules.agent_may_stop and not calls and STOP in message["content"]
            return "agent_stop" if stops else None
        return "user_stop" if is_user_stop(message) else None

    def _check_limits(self) -> None:
        """Ends it at its limits, also where the last message ended it already."""
        if self.steps >= self.rules.max_steps:
            self.ending = "max_steps"
        if self.errors >= self.rules.max_errors:
            self.ending = "too_many_errors"

    def _resume(self, last: TauMessage) -> None:
        if last["role"] == "tool":
            self._next = last["requestor"]
        else:
            self._next = "user" if last["role"] == "assistant" else "assistant"
            self.ending = self._ending_by(last)


def is_user_stop(message: Json) -> bool:
    """The customer's tokens count anywhere in the text, but not beside calls."""
    content = message.get("content")
    if not isinstance(content, str) or message.get("tool_calls"):
        return False
    return any(token in content for token in (STOP, TRANSFER, OUT_OF_SCOPE))
