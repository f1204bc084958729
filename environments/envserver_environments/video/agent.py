"""One agent: an append-only conversation that can be asked several questions.

It continues until it calls `finish`, writes text without a call (or `FINAL:`, in the text
protocol), is cut off (which is no answer), has used up its turns, or has made ten bad calls.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from envserver_records.tasks import Json
from envserver_tools.calling import (
    MAX_RESULT_CHARACTERS,
    Tool,
    ToolError,
    call_tool,
    descriptions,
    function_tool,
    toolbox,
    visible_text,
)
from envserver_tools.protocol import FORMAT, ProtocolRun, describe_tools, run_protocol
from envserver_tools.retrieval import BM25

from envserver import InputError, Message, Reply, Rollout

from .context import Line, Modality, VideoContext, stamp
from .prompts import system_prompt

MAX_ITEMS = 60
MAX_HITS = 10
DEFAULT_HITS = 5
MAX_ANSWER_CHARACTERS = 500
_ROOM = MAX_RESULT_CHARACTERS - 100
"""Characters of lines in a result; the rest is for the note about the lines left out."""

TOOLS_OF: dict[Modality, tuple[str, ...]] = {
    "captions": ("get_captions", "search_captions"),
    "transcript": ("get_transcript",),
    "scene_graph": ("get_scene_graph",),
}

_RANGE = {
    "t0": {"type": "number", "minimum": 0, "description": "From this second on; default 0."},
    "t1": {"type": "number", "minimum": 0, "description": "To this second; default the end."},
}


def _number(most: int, description: str) -> Json:
    return {"type": "integer", "minimum": 1, "maximum": most, "description": description}


_NOTHING: dict[Modality, str] = {
    "captions": "Of this video there are no captions.",
    "transcript": "Of this video there is no transcript.",
    "scene_graph": "Of this video there are no scene graphs.",
}


class Finished(Exception):
    """The agent is done; `answer` is its answer."""

    def __init__(self, answer: str) -> None:
        super().__init__(answer)
        self.answer = answer


def video_tools(context: VideoContext) -> dict[str, Tool]:
    """The tools that read `context`, by name; `finish` is not among them."""

    def ranged(modality: Modality) -> Callable[..., str]:
        return partial(_in_range, context, modality)

    return toolbox(
        Tool(
            function_tool(
                "get_captions",
                "Shows captions of a part of the video, in the order of time.",
                {
                    **_RANGE,
                    "max_items": _number(
                        MAX_ITEMS, f"The most captions to show; default {MAX_ITEMS}."
                    ),
                },
            ),
            ranged("captions"),
        ),
        Tool(
            function_tool(
                "search_captions",
                "Finds the captions that share words with a query, best first.",
                {
                    "query": {"type": "string", "minLength": 1, "maxLength": 300},
                    "top_k": _number(MAX_HITS, f"How many; default {DEFAULT_HITS}."),
                },
                ["query"],
            ),
            partial(_found, context),
        ),
        Tool(
            function_tool(
                "get_transcript", "Shows what is said in a part of the video, and by whom.", _RANGE
            ),
            ranged("transcript"),
        ),
        Tool(
            function_tool(
                "get_scene_graph",
                "Shows how things are related in a part of the video: (thing, relation, thing).",
                _RANGE,
            ),
            ranged("scene_graph"),
        ),
    )


def finish_tool() -> Tool:
    return Tool(
        function_tool(
            "finish",
            "Gives the final answer and ends the task.",
            {"answer": {"type": "string", "maxLength": MAX_ANSWER_CHARACTERS}},
            ["answer"],
        ),
        _finish,
    )


def _finish(answer: str) -> str:
    raise Finished(answer)


def _in_range(
    context: VideoContext,
    modality: Modality,
    t0: float = 0.0,
    t1: float = math.inf,
    max_items: int = MAX_ITEMS,
) -> str:
    if t1 < t0:
        raise ToolError("t1 must not be before t0.")
    if modality not in context.modalities:
        return _NOTHING[modality]
    lines = context.lines(modality, t0, t1)
    if not lines:
        return "There is nothing in this part of the video."
    shown = lines[:max_items]
    while len(shown) > 1 and sum(len(str(line)) + 1 for line in shown) > _ROOM:
        shown.pop()
    left = lines[len(shown) :]
    rest = [f"({len(left)} more; go on from t0 = {left[0].t0:g})"] if left else []
    return "\n".join([*map(str, shown), *rest])


def _found(context: VideoContext, query: str, top_k: int = DEFAULT_HITS) -> str:
    lines: list[Line] = context.lines("captions")
    if not lines:
        return _NOTHING["captions"]
    hits = BM25(line.text for line in lines).top(query, top_k)
    return (
        "\n".join(str(lines[number]) for number, _ in hits) or "No caption shares a word with it."
    )


MAX_SHOWN = 128
"""Frames in one conversation: what a request may hold is limited, too (`--tokens.max_media`)."""


class FrameViewer:
    def __init__(self, run: Rollout) -> None:
        self._run = run
        self._next: list[Json] = []
        self._shown = 0

    async def show(self, t0: float = 0.0, t1: float | None = None) -> str:
        """Has the agent see frames of a part of the video; returns what is said of them."""
        try:
            found = await self._run.call_tool("frames", {"t0": t0, "t1": t1})
        except InputError as error:
            raise ToolError(error.message) from error
        length, frames = stamp(found["seconds"]), found["frames"]
        if not frames:
            raise ToolError(f"There are no frames there: the video lasts {length}.")
        if self._shown + len(frames) > MAX_SHOWN:
            raise ToolError("You have seen as many frames as can be shown.")
        self._shown += len(frames)
        for frame in frames:
            self._next.append({"type": "text", "text": f"{stamp(frame['time'])}:"})
            self._next.append({"type": "image_url", "image_url": {"url": frame["url"]}})
        times = f"{stamp(frames[0]['time'])} to {stamp(frames[-1]['time'])}"
        return f"{len(frames)} frames follow, from {times}. The video lasts {length}."

    def tool(self) -> Tool:
        description = function_tool(
            "view_frames",
            "Shows frames of a part of the video, evenly spread over it. Shorter parts show more.",
            {
                "t0": {"type": "number", "minimum": 0, "description": "From this second on."},
                "t1": {"type": "number", "minimum": 0, "description": "To this second."},
            },
        )
        return Tool(description, self.show)

    def put_into(self, messages: list[Message]) -> None:
        if not self._next:
            return
        frames, self._next = self._next, []
        last = messages[-1]
        if last["role"] == "user":
            last["content"] = [{"type": "text", "text": last["content"]}, *frames]
        else:
            messages.append({"role": "user", "content": frames})


def said(message: Message) -> Any:
    """Returns a message's content for readers: frames by their number only."""
    content = message.get("content")
    if not isinstance(content, list):
        return content
    texts = [part["text"] for part in content if part.get("type") == "text"]
    images = sum(part.get("type") == "image_url" for part in content)
    return "\n".join([*texts, f"({images} frames)"])


Protocol = Literal["tools", "text"]
MAX_TOOL_ERRORS = 10


@dataclass(frozen=True)
class AgentAnswer:
    """The answer of an agent."""

    answer: str | None = None
    text: str = ""  # its last text; "" if that was cut off

    @property
    def words(self) -> str:
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

    def _tell(self, calls: list[Json], text: str) -> None:
        self._messages += [
            {"role": "tool", "tool_call_id": call.get("id", ""), "content": text} for call in calls
        ]

    def _count(self, errors: int) -> None:
        self._errors += errors
        if errors:
            name = f"tool_errors_{self.name}" if self.name else "tool_errors"
            self._run.log_metric(name, float(self._errors))


def readable(reply: Reply) -> Any:
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
