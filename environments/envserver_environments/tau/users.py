"""Customers: scripted by their task, or played by a model.

Scripts make rollouts cheap and the same each time. A script is a list of rules of which the first
that fits is followed: `{"if": pattern that is looked for in the assistant's last words (case does
not count) or "always", "calls": [{"name", "arguments"}] of his own tools (may be absent), "say":
his words then, in which {result} is what the last call gave}`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from envserver import InputError, Rollout

from .domains.world import World
from .episodes import STOP, Episode
from .prompts import user_prompt
from .speaking import ModelCustomer, Speaker, Utterance
from .tasks import TauMessage, TauTask
from .wire import seen_by

UserKind = Literal["auto", "script", "model"]
Rule = Mapping[str, Any]

USER = "user"
"""Name of the agent whose model plays the customer."""
MAX_REPEATS = 5
"""So often a scripted customer says the same; then he gives up, which ends the conversation."""


def customer_of(
    kind: UserKind, script: Sequence[Rule], task: TauTask, episode: Episode, run: Rollout
) -> Speaker:
    """The customer of a task.

    Raises:
        InputError: a script is asked for and there is none.
    """
    if kind == "script" and not script:
        raise InputError(f"Task {task.id!r} has no script for its customer.")
    if script and kind != "model":
        return ScriptedCustomer(script, episode.messages)
    tools = user_tools(episode.world, task)
    return ModelCustomer(
        run,
        USER,
        user_prompt(task.user_scenario, has_tools=bool(tools)),
        tools,
        seen_by("user", episode.messages),
    )


def user_tools(world: World, task: TauTask) -> list[dict[str, Any]]:
    """What the customer may do himself, in OpenAI's shape."""
    if world.user is None:
        return []
    known = world.user.tools().values()
    return [
        tool.schema for tool in known if task.user_tools is None or tool.name in task.user_tools
    ]


class ScriptedCustomer:
    """A customer without a model.

    Args:
        script: its last rule is "always".
        history: what was said before his first turn.
    """

    def __init__(self, script: Sequence[Rule], history: Sequence[TauMessage] = ()) -> None:
        self._script = script
        self._heard = ""
        self._words: str | None = None
        self._uses: Counter[int] = Counter()
        for message in history:
            if message["role"] == "assistant" and message.get("content"):
                self.hear(message["content"])

    def hear(self, content: str) -> None:
        self._heard = content

    def receive(self, results: Sequence[TauMessage]) -> None:
        if self._words is not None and results:
            self._words = self._words.replace("{result}", str(results[-1]["content"]))

    async def speak(self) -> Utterance:
        return self.say()

    def say(self) -> Utterance:
        """His next words or calls."""
        if self._words is not None:
            words, self._words = self._words, None
            return Utterance(words)
        place = matching_rule(self._script, self._heard)
        self._uses[place] += 1
        if self._uses[place] > MAX_REPEATS:
            return Utterance(f"This leads nowhere. {STOP}")
        rule = self._script[place]
        calls = [
            {"id": f"user_{self._uses.total()}_{number}", **call}
            for number, call in enumerate(rule.get("calls") or ())
        ]
        if not calls:
            return Utterance(rule["say"])
        self._words = rule["say"]
        return Utterance(calls=calls)


def matching_rule(script: Sequence[Rule], heard: str) -> int:
    """Place of the rule that fits what was heard; the last where none does."""
    for place, rule in enumerate(script):
        if rule["if"] == "always" or re.search(rule["if"], heard, re.IGNORECASE):
            return place
    return len(script) - 1
