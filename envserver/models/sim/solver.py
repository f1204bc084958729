"""Gives the simulated policy correct answers, from an environment's demonstrations."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

import msgspec
from envserver_records.records import Message

_REMEMBERED_TEXTS = 4096


class Solution(msgspec.Struct, frozen=True):
    """A demonstration that is played.

    Args:
        turns: the assistant's messages, one per turn.
        exact: they are played word for word, with no sentence before or after them.
    """

    turns: list[Message]
    exact: bool = False


class Solver(Protocol):
    """Finds the demonstration of the task that a conversation is about."""

    def solve(self, messages: list[Message], rollout_id: str) -> Solution | None:
        """Returns its demonstration, or None if none is known.

        `rollout_id` is "" for requests from outside. Called for every request on the event loop, so
        it must be fast.
        """


class RolloutSolver:
    """Demonstrations by rollout, assigned by the code that starts the rollouts."""

    def __init__(self) -> None:
        self._solutions: dict[str, Solution] = {}

    def assign(self, rollout_id: str, turns: list[Message] | None, *, exact: bool = False) -> None:
        """Assigns a demonstration to `rollout_id`; None: it has none. `exact`: see Solution."""
        if turns:
            self._solutions[rollout_id] = Solution(turns, exact)
        else:
            self.forget(rollout_id)

    def forget(self, rollout_id: str) -> None:
        """Forgets a rollout that is over; unknown ids are ignored."""
        self._solutions.pop(rollout_id, None)

    def solve(self, messages: list[Message], rollout_id: str) -> Solution | None:
        """See Solver."""
        return self._solutions.get(rollout_id)


class TextSolver:
    """Demonstrations by the question's text, which must occur in a user's message.

    The last user message with a known question decides, and in it the question that ends last (a
    prompt may show others as examples), the longer of two that end together.

    Args:
        tasks: question and demonstration; of equal questions the last counts, empty ones do not.
        exact: see Solution.
    """

    def __init__(self, tasks: Iterable[tuple[str, list[Message]]], *, exact: bool = False) -> None:
        self._solutions = {
            text.strip(): Solution(turns, exact) for text, turns in tasks if text.strip()
        }
        # Questions by their last characters, so that a message is searched for all of them at once.
        self._by_ending: dict[int, dict[str, list[str]]] = {}
        for question in sorted(self._solutions, key=len, reverse=True):
            length = min(len(question), 24)
            endings = self._by_ending.setdefault(length, {})
            endings.setdefault(question[-length:], []).append(question)
        self._found: OrderedDict[str, Solution | None] = OrderedDict()

    def solve(self, messages: list[Message], rollout_id: str) -> Solution | None:
        """See Solver."""
        for message in reversed(messages):
            if message.get("role") == "user":
                solution = self._remembered(str(message.get("content") or ""))
                if solution is not None:
                    return solution
        return None

    def _remembered(self, text: str) -> Solution | None:
        if text in self._found:
            self._found.move_to_end(text)
            return self._found[text]
        question = self._last_question(text)
        solution = None if question is None else self._solutions[question]
        self._found[text] = solution
        if len(self._found) > _REMEMBERED_TEXTS:
            self._found.popitem(last=False)
        return solution

    def _last_question(self, text: str) -> str | None:
        for end in range(len(text), 0, -1):
            here = [
                question
                for length, endings in self._by_ending.items()
                if length <= end
                for question in endings.get(text[end - length : end], ())
                if text.endswith(question, 0, end)
            ]
            if here:
                return max(here, key=len)
        return None
