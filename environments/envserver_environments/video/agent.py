"""One agent: an append-only conversation that can be asked several questions.

In: a system prompt, tools, and questions. Out: an `AgentAnswer` to each. The agent continues until
it calls `finish`, writes text without a call (or `FINAL:`, in the text protocol), is cut off, has
used up its turns, or has made ten bad calls. Output that was cut off is not an answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from envserver_tools.calling import Tool, call_tool, descriptions
from envserver_tools.protocol import FORMAT, ProtocolRun, describe_tools, run_protocol
from envserver_tools.visible import visible_text

from envserver import Message, Reply, Rollout

from .prompts import system_prompt
from .tools import Finished, FrameViewer, said

Protocol = Literal["tools", "text"]
MAX_TOOL_ERRORS = 10


@dataclass(frozen=True)
class AgentAnswer:
    """The answer of an agent.

    Args:
        answer: the argument of `finish`, or the text after `FINAL:`; None: it ended otherwise.
        text: its last text; "" if that was cut off.
    """

    answer: str | None = None
    text: str = ""

    @property
    def words(self) -> str:
        """Returns the visible text, for others to read."""
        text = (visible_text(self.text) or "").strip()
        if self.answer is None:
            return text
        return f"{text}\nAnswer: {self.answer}" if text else f"Answer: {self.answer}"


class Agent:
    """An agent of a rollout.

    Args:
        name: distinguishes its calls from other agents'; None: it is the only agent.
        system: its system prompt, without the instructions on tool calls.
        ending: name of the prompt on how to end, if it uses tool calls.
        max_turns: maximum number of messages in all.
        frames: shows it frames of the video; None: it sees none.
    """

    def __init__(
        self,
        run: Rollout,
        name: str | None,
        *,
        system: str,
        tools: Mapping[str, Tool],
        protocol: Protocol = "tools",
        ending: str = "ending_tools",
        max_turns: int | None = None,
        frames: FrameViewer | None = None,
    ) -> None:
        self.name = name
        self.turns_left = min(run.max_turns, max_turns or run.max_turns)
        self._run = run
        self._tools = tools
        self._protocol = protocol
        self._frames = frames
        self._errors = 0
        parts = [system, system_prompt(ending)]
        if protocol == "text":
            parts = [system, FORMAT, describe_tools(tools.values()), system_prompt("ending_text")]
        self._messages: list[Message] = [{"role": "system", "content": "\n\n".join(parts)}]

    async def ask(self, question: str) -> AgentAnswer:
        """Returns its answer to `question`, which is added to its conversation."""
        self._messages.append({"role": "user", "content": question})
        if self.turns_left <= 0 or self._errors >= MAX_TOOL_ERRORS:
            return AgentAnswer()
        if self._protocol == "text":
            return await self._by_text()
        return await self._by_calls()

    async def _by_calls(self) -> AgentAnswer:
        text = ""
        while self.turns_left > 0 and self._errors < MAX_TOOL_ERRORS:
            reply = await self._chat(self._messages, tools=descriptions(self._tools.values()))
            self._messages.append(reply.message)
            if reply.finish_reason == "length":
                self._tell(reply.tool_calls, "Error: the message was cut off.")
                return AgentAnswer()
            if not reply.tool_calls:
                return AgentAnswer(text=reply.content)
            text = reply.content or text
            for place, call in enumerate(reply.tool_calls):
                try:
                    result = await call_tool(self._tools, call)
                except Finished as end:
                    self._tell(reply.tool_calls[place:], "Noted.")
                    return AgentAnswer(end.answer, text)
                self._tell([call], result.text)
                self._count(not result.ok)
        return AgentAnswer(text=text)

    async def _by_text(self) -> AgentAnswer:
        record, errors = ProtocolRun(), self._errors
        answer: str | None = None
        try:
            await run_protocol(
                self._chat,
                self._tools,
                self._messages,
                max_steps=self.turns_left,
                max_tool_errors=MAX_TOOL_ERRORS - errors,
                record=record,
            )
            answer = record.answer
        except Finished as end:
            answer = end.answer
        self._messages = record.messages
        self._count(record.tool_errors)
        thoughts = [step["text"] for step in record.steps if step["type"] == "thought"]
        return (
            AgentAnswer()
            if answer is None
            else AgentAnswer(answer, thoughts[-1] if thoughts else "")
        )

    async def _chat(self, messages: list[Message], **how: Any) -> Reply:
        self.turns_left -= 1
        if self._frames is not None:
            self._frames.put_into(messages)
        reply = await self._run.chat(messages, agent=self.name, **how)
        seen = said(messages[-1])
        self._run.log_action("reason", {"agent": self.name, "seen": seen}, readable(reply))
        return reply

    def _tell(self, calls: list[dict[str, Any]], text: str) -> None:
        self._messages += [
            {"role": "tool", "tool_call_id": call.get("id", ""), "content": text} for call in calls
        ]

    def _count(self, errors: int) -> None:
        self._errors += errors
        if errors:
            name = f"tool_errors_{self.name}" if self.name else "tool_errors"
            self._run.log_metric(name, float(self._errors))


def readable(reply: Reply) -> Any:
    """Returns a message as text: its content, and its calls if there are any."""
    if not reply.tool_calls:
        return reply.content
    calls = [
        {"tool": call["function"]["name"], "args": _loaded(call["function"]["arguments"])}
        for call in reply.tool_calls
    ]
    return {"text": reply.content, "calls": calls}


def _loaded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
