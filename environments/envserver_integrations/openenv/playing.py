"""The agent's loop: observations become messages, the model's answers become actions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import orjson

from envserver import Message, Reply, Rollout

from .actions import conversation, filled, text_of_observation, text_of_result

_BEGIN: Final = "Use the tools."
"""The first message where the first observation says nothing."""


class Player:
    """Plays one episode.

    Args:
        config: of the environment.
    """

    def __init__(self, config: Any, run: Rollout) -> None:
        self.done = False
        self.rewards: list[float] = []
        """What the server gave, step by step."""
        self._config = config
        self._run = run
        self._messages: list[Message] = []
        self._how: dict[str, Any] = {}

    async def play(self, reset: Mapping[str, Any]) -> None:
        """Plays until the server says that it is done, or the model neither acts nor answers where
        it must act by tools.
        """
        run, config = self._run, self._config
        self._how = await run.call_tool("begin", {})
        self.done = self._how["done"]
        first = self._how["observation"]
        self._messages = conversation(first) or [
            *([{"role": "system", "content": config.system}] if config.system else []),
            {"role": "user", "content": text_of_observation(first, config.prompt) or _BEGIN},
        ]
        tools = None if config.action else self._how["tools"] or None
        while not self.done:
            reply = await run.chat(self._messages, tools=tools)
            self._messages = [*self._messages, reply.message]
            if reply.tool_calls and tools:
                await self._call(reply)
            elif config.action or self._how["text_field"]:
                await self._say(reply.content)
            else:
                return

    async def _say(self, text: str) -> None:
        """Takes the action that the model wrote."""
        answer = _answer(text, self._config.answer)
        if answer is None:
            self._tell(f"Write your answer so that it matches {self._config.answer}.")
            return
        if self._config.action:
            action = filled(self._config.action, answer)
        else:
            action = {self._how["text_field"]: answer}
        result = await self._step(action)
        if "invalid" in result:
            self._tell(f"This action is not possible: {result['invalid']}")
            return
        observation = result["observation"]
        carried = conversation(observation)
        if carried is not None:
            self._messages = carried
        else:
            self._tell(text_of_observation(observation, self._config.observation))

    async def _call(self, reply: Reply) -> None:
        """Takes the actions that the model called, one after the other."""
        for call in reply.tool_calls:
            text = "The episode is over." if self.done else await self._called(call["function"])
            answer = {"role": "tool", "tool_call_id": call["id"], "content": text}
            self._messages = [*self._messages, answer]

    async def _called(self, function: Mapping[str, Any]) -> str:
        try:
            arguments = orjson.loads(function["arguments"] or "{}")
            orjson.dumps(arguments)  # what is nested too deeply cannot be sent
        except (ValueError, TypeError) as error:
            return f"Error: the arguments are not JSON: {error}"
        if not isinstance(arguments, dict):
            return "Error: the arguments must be a JSON object"
        is_act = self._how["mode"] == "act"
        action = arguments
        if not is_act:
            name = function["name"]
            action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        elif function["name"] != self._how["act"]:
            return f"Error: there is no tool {function['name']!r}"
        result = await self._step(action)
        if "invalid" in result:
            return f"Error: {result['invalid']}"
        observation = result["observation"]
        if is_act:
            return text_of_observation(observation, self._config.observation)
        return text_of_result(observation)

    async def _step(self, action: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = await self._run.call_tool("step", {"action": action})
        if "invalid" in result:
            return result
        self.done = result["done"]
        reward = result["reward"]
        if reward is not None:
            self.rewards.append(reward)
            if self._config.reward == "sum":
                self._run.reward(reward)
        return result

    def _tell(self, text: str) -> None:
        self._messages = [*self._messages, {"role": "user", "content": text}]


def _answer(text: str, pattern: str) -> str | None:
    """Returns the model's answer; None: its text has none."""
    if not pattern:
        return text
    found = re.search(pattern, text, re.DOTALL)
    return found[1].strip() if found else None
