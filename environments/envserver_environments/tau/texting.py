"""An assistant who speaks in plain texts: THOUGHT, TOOL_CALL and FINAL
(envserver_tools/protocol.py).

For models without native tool calls. FINAL holds the text for the customer; one call a message.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from envserver_tools.calling import Tool
from envserver_tools.protocol import RESULT_HEAD, Part, describe_tools, parse_message

from envserver import Message

from .prompts import text_prompt
from .speaking import ModelSpeaker, Utterance
from .tasks import TauMessage

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
        told = "\n".join(str(result["content"]) for result in results)
        self.hear(f"{RESULT_HEAD}\n{told}")

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
    """Converts messages with tool calls to texts of a model that has none."""
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
