"""Customers: scripted by their task, or played by a model.

Scripts make rollouts cheap and repeatable. A script is a list of rules of which the first match is
followed: `{"if": pattern in the assistant's last message (case-insensitive) or "always", "calls":
[{"name", "arguments"}] of the customer's own tools (optional), "say": the customer's text, in which
{result} is the last call's result}`.
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
"""Name of the agent whose model simulates the customer."""
MAX_REPEATS = 5
"""After this many repeats a scripted customer gives up, which ends the conversation."""


def customer_of(
    kind: UserKind, script: Sequence[Rule], task: TauTask, episode: Episode, run: Rollout
) -> Speaker:
    """Returns the customer of a task."""
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
    """Returns the customer's own tools, in OpenAI's form."""
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
        history: the conversation before the customer's first turn.
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
        """Returns the next text or calls."""
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
    """Returns the index of the rule that matches, or of the last one."""
    for place, rule in enumerate(script):
        if rule["if"] == "always" or re.search(rule["if"], heard, re.IGNORECASE):
            return place
    return len(script) - 1
