"""The agent's loop: observations become messages, the model's answers become actions. A server
whose actions name a tool (`tool_name`) offers its tools to the model; one whose actions have a
single text field gets the model's text there; any other one gets its actions by one tool, `act`."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import orjson
from envserver_records.tasks import Json

from envserver import Message, Reply, Rollout

Mode = Literal["tools", "text", "act"]
ACT = "act"
_OURS = ("type", "metadata", "tool_name", "arguments", "tool_calls")
"""Fields of actions that no text goes into."""
_ABOUT = ("done", "reward", "metadata")
_PLACE = re.compile(r"\{(\w+)\}")


def mode_of(schema: Json) -> Mode:
    if "tool_name" in _properties(schema):
        return "tools"
    return "text" if text_field(schema) else "act"


def text_field(schema: Json) -> str | None:
    """Returns the only field of text; None: there is none, or there are other fields."""
    fields = [name for name in _properties(schema) if name not in _OURS]
    if len(fields) != 1 or _properties(schema)[fields[0]].get("type") != "string":
        return None
    return fields[0]


def act_tool(schema: Json) -> Json:
    kept = {key: value for key, value in schema.items() if key not in ("title", "description")}
    fields = {name: field for name, field in _properties(schema).items() if name != "metadata"}
    return _function(
        ACT,
        str(schema.get("description") or "Takes the next action."),
        {**kept, "type": "object", "properties": fields},
    )


def tools_of(listed: Json) -> list[Json]:
    """Returns the tools of an answer to `list_tools`, in OpenAI's form."""
    tools = listed.get("tools")
    return [
        _function(
            str(tool.get("name", "")),
            str(tool.get("description") or ""),
            tool.get("input_schema") or tool.get("inputSchema") or {"type": "object"},
        )
        for tool in (tools if isinstance(tools, list) else [])
        if isinstance(tool, dict)
    ]


def filled(template: str, answer: str) -> Json:
    """Returns the action of a JSON template in which "{answer}" stands for the model's text."""
    made = json.loads(template)
    if not isinstance(made, dict):
        raise ValueError("it is not a JSON object")
    found = _filled(made, answer)
    assert isinstance(found, dict)
    return found


def conversation(observation: Json) -> list[Message] | None:
    """Returns the messages that an observation carries, as envserver's servers give them."""
    messages = observation.get("messages")
    if not isinstance(messages, list) or not messages or "available_tools" not in observation:
        return None
    alike = all(isinstance(message, dict) and "role" in message for message in messages)
    return messages if alike else None


def text_of_observation(observation: Json, template: str) -> str:
    """Fills the template with fields of the observation; without one: its only field, or all as
    JSON."""
    if template:
        return _PLACE.sub(lambda found: _as_text(observation.get(found[1])), template)
    fields = {
        name: value
        for name, value in observation.items()
        if name not in _ABOUT and value not in (None, "", [], {})
    }
    if len(fields) == 1:
        return _as_text(next(iter(fields.values())))
    return json.dumps(fields, ensure_ascii=False) if fields else ""


def text_of_result(observation: Json) -> str:
    error = observation.get("error")
    if error:
        return f"Error: {error.get('message', error) if isinstance(error, dict) else error}"
    result = observation.get("result")
    if not isinstance(result, dict):
        return _as_text(result)
    if result.get("data") is not None:
        return _as_text(result["data"])
    content = result.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return _as_text(result)


def _properties(schema: Json) -> dict[str, Json]:
    found = schema.get("properties")
    return {
        name: field if isinstance(field, dict) else {}
        for name, field in (found if isinstance(found, dict) else {}).items()
        if name != "metadata"
    }


def _function(name: str, description: str, parameters: Any) -> Json:
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def _filled(part: Any, answer: str) -> Any:
    if isinstance(part, str):
        return part.replace("{answer}", answer)
    if isinstance(part, dict):
        return {key: _filled(value, answer) for key, value in part.items()}
    if isinstance(part, list):
        return [_filled(value, answer) for value in part]
    return part


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_BEGIN = "Use the tools."
"""The first message where the first observation says nothing."""


class Player:
    def __init__(self, config: Any, run: Rollout) -> None:
        self.done = False
        self.rewards: list[float] = []
        """What the server gave, step by step."""
        self._config = config
        self._run = run
        self._messages: list[Message] = []
        self._how: Json = {}

    async def play(self, reset: Json) -> None:
        """Plays until the server says that it is done, or the model neither acts nor answers where
        it must act by tools."""
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
        for call in reply.tool_calls:
            text = "The episode is over." if self.done else await self._called(call["function"])
            answer = {"role": "tool", "tool_call_id": call["id"], "content": text}
            self._messages = [*self._messages, answer]

    async def _called(self, function: Json) -> str:
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

    async def _step(self, action: Json) -> Json:
        result: Json = await self._run.call_tool("step", {"action": action})
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
    if not pattern:
        return text
    found = re.search(pattern, text, re.DOTALL)
    return found[1].strip() if found else None
