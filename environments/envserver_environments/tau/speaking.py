"""One side of a conversation: it hears messages, receives its calls' results, and speaks. Assistant
and customer differ only in prompt, tools and agent name."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from envserver_records.tasks import Json
from envserver_tools.calling import StrictDecoder, Tool, check_characters, visible_text
from envserver_tools.protocol import RESULT_HEAD, Part, describe_tools, parse_message

from envserver import InputError, Message, Reply, Rollout, ServiceError

from .domains.toolkit import Requestor
from .domains.world import World
from .episodes import STOP, Episode
from .prompts import text_prompt, user_prompt
from .tasks import TauMessage, TauTask, has_text

# A model's output is never trusted: arguments that are not a JSON object stay text, and the world
# answers with an error.


def calls_of(tool_calls: Sequence[Json]) -> list[Json]:
    """A model's tool calls as an episode takes them: `{"id", "name", "arguments"}`."""
    return [_call(call) for call in tool_calls]


def as_openai(message: TauMessage) -> Message:
    """Adds the requestor of a result; `tasks.message_of_row` reads it back unchanged."""
    if message["role"] == "tool":
        fields = {"role": "tool", "tool_call_id": message["id"], "content": message["content"]}
        return {**fields, "requestor": message["requestor"], "error": message["error"]}
    said: Message = {"role": message["role"], "content": message["content"]}
    if message.get("tool_calls"):
        said["tool_calls"] = [_function_call(call) for call in message["tool_calls"]]
    return said


def seen_by(side: Requestor, messages: Sequence[TauMessage]) -> Iterator[Message]:
    """Returns the conversation as one side sees it: itself as the assistant, only its own calls."""
    for message in messages:
        if message["role"] == "tool":
            if message["requestor"] == side:
                yield result_for_model(message)
        elif message["role"] == side:
            yield {**as_openai(message), "role": "assistant"}
        elif has_text(message) and not message.get("tool_calls"):
            yield {"role": "user", "content": message["content"]}


def result_for_model(result: TauMessage) -> Message:
    return {"role": "tool", "tool_call_id": result["id"], "content": result["content"]}


def assistant_calls(*calls: tuple[str, Json]) -> Message:
    made = [
        _function_call({"id": f"call_{place}", "name": name, "arguments": arguments})
        for place, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def _call(call: Json) -> Json:
    function = call.get("function") or {}
    source = function.get("arguments")
    return {
        "id": str(call.get("id") or ""),
        "name": str(function.get("name") or ""),
        "arguments": _arguments(source if isinstance(source, str) else json.dumps(source)),
    }


def _arguments(source: str) -> Json | str:
    try:
        value = json.loads(source or "{}", cls=StrictDecoder)
        check_characters(source, value)
    except (ValueError, RecursionError):
        return source
    return value if isinstance(value, dict) else source


def _function_call(call: Json) -> Json:
    # A text that is not an object is written as a JSON string: it is read back as the text it is.
    source = json.dumps(call["arguments"])
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": call["name"], "arguments": source},
    }


MAX_EMPTY_ANSWERS = 3
"""After this many unusable answers at a turn a customer's model is an infrastructure failure."""


@dataclass(frozen=True)
class Utterance:
    """A side's turn: a text, or calls (`{"id", "name", "arguments"}`)."""

    content: str | None = None
    calls: Sequence[Json] = ()
    cut_off: bool = False  # neither text nor calls count
    dropped_words: bool = False  # there was text beside the calls


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
    """A side that a model writes: one append-only conversation, so one training sequence. `history`
    is the earlier conversation, as this side sees it."""

    run: Rollout
    name: str
    system: str
    tools: list[Json] = field(default_factory=list)
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
        text = "\n".join(str(result["content"]) for result in results)
        self.hear(f"{RESULT_HEAD}\n{text}")

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


# Scripts make rollouts cheap and repeatable. A script is a list of rules of which the first match
# is followed: `{"if": pattern in the assistant's last message (case-insensitive) or "always",
# "calls": [{"name", "arguments"}] of the customer's own tools (optional), "say": the customer's
# text, in which {result} is the last call's result}`.

UserKind = Literal["auto", "script", "model"]
Rule = Json

USER = "user"
MAX_REPEATS = 5
"""After this many repeats a scripted customer gives up, which ends the conversation."""


def customer_of(
    kind: UserKind, script: Sequence[Rule], task: TauTask, episode: Episode, run: Rollout
) -> Speaker:
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


def user_tools(world: World, task: TauTask) -> list[Json]:
    if world.user is None:
        return []
    known = world.user.tools().values()
    return [
        tool.schema for tool in known if task.user_tools is None or tool.name in task.user_tools
    ]


class ScriptedCustomer:
    """A customer without a model; the last rule of the script is "always"."""

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
