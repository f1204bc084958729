"""How an agent sees frames: all at once with the question, or by the tool `view_frames`.

In: the service `frames`. Out: parts of a message, each frame behind its time. A tool's result is
text in every chat template, so frames that it brought follow in the next user message.
"""

from __future__ import annotations

from typing import Any

from envserver_tools.calling import Tool, ToolError, function_tool

from envserver import InputError, Message, Rollout

from ..context import stamp

MAX_SHOWN = 128
"""Frames in one conversation: what a request may hold is limited, too (`--tokens.max_media`)."""


class FrameViewer:
    """The frames that one agent has looked at, and those that it is to see next."""

    def __init__(self, run: Rollout) -> None:
        self._run = run
        self._next: list[dict[str, Any]] = []
        self._shown = 0

    async def show(self, t0: float = 0.0, t1: float | None = None) -> str:
        """Has the agent see frames of a part of the video; returns what is said of them."""
        try:
            told = await self._run.call_tool("frames", {"t0": t0, "t1": t1})
        except InputError as error:
            raise ToolError(error.message) from error
        length, frames = stamp(told["seconds"]), told["frames"]
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
        """The tool that shows frames of a part of the video."""
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
        """Adds the frames that the agent is to see next to its conversation."""
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
