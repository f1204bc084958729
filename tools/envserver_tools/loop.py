"""The agent loop: chat with tools until the model is done.

In: a rollout, a conversation and tools. Out: a `LoopEnd`; the conversation grows in place, and the
metric `tool_errors` counts the calls that failed. The loop ends at a call of the final tool, at a
message without tool calls, at a message that was cut off, after `max_turns`, or after
`max_tool_errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from envserver import Message, Reply, Rollout

from .calling import Tool, call_tool, descriptions

EndReason = Literal["final_tool", "text", "cut_off", "limit"]


@dataclass(frozen=True)
class LoopEnd:
    """How a loop ended.

    Args:
        reason: "limit" means the turns or the tool errors.
        text: the last message's text; may be empty.
        last_text: the last text that is not empty.
        result: what the final tool returned; None without a valid call of it.
    """

    reason: EndReason
    text: str
    last_text: str
    result: str | None = None


async def chat_with_tools(
    run: Rollout,
    messages: list[Message],
    tools: Mapping[str, Tool],
    *,
    final: str,
    max_turns: int | None = None,
    max_tool_errors: int = 10,
    errors_in_a_row: bool = False,
    on_reply: Callable[[Reply], None] = lambda reply: None,
    reminder: Callable[[str], str | None] = lambda text: None,
    is_answer: Callable[[str], bool] = lambda text: False,
) -> LoopEnd:
    """Chats and runs tool calls until the model is done.

    Args:
        messages: the conversation; replies and tool results are appended to it.
        final: name of the tool whose valid call ends the loop; later calls are not run.
        max_turns: maximum number of the model's messages; `run.max_turns` applies, too.
        errors_in_a_row: a call that succeeds resets the errors counted for `max_tool_errors`.
        on_reply: called with each reply before its tool calls run.
        reminder: gets a text without tool calls; returns a user message to continue with, or None
        to end the loop.
        is_answer: whether a text beside tool calls answers the task; these calls run first.
    """
    text = last_text = ""
    errors = counted = 0
    offered = descriptions(tools.values())
    for _ in range(min(run.max_turns, max_turns or run.max_turns)):
        reply = await run.chat(messages, tools=offered)
        text, last_text = reply.content, reply.content or last_text
        messages.append(reply.message)
        on_reply(reply)
        if reply.finish_reason == "length":
            return LoopEnd("cut_off", text, last_text)
        if not reply.tool_calls:
            reminding = reminder(text)
            if reminding is None:
                return LoopEnd("text", text, last_text)
            messages.append({"role": "user", "content": reminding})
        for call in reply.tool_calls:
            result = await call_tool(tools, call)
            if result.ok and call["function"]["name"] == final:
                return LoopEnd("final_tool", text, last_text, result.text)
            errors += not result.ok
            counted = 0 if result.ok and errors_in_a_row else counted + (not result.ok)
            run.log_metric("tool_errors", errors)
            messages.append(
                {"role": "tool", "tool_call_id": call.get("id", ""), "content": result.text}
            )
        if counted >= max_tool_errors:
            break
        if reply.tool_calls and is_answer(text):
            return LoopEnd("text", text, last_text)
    return LoopEnd("limit", text, last_text)
