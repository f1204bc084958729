"""The agent: a loop of chat and tool calls that ends with an answer. Returns {"answer": the
argument of `finish` or None, "text": the last text}."""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Literal

from envserver_records.tasks import Json
from envserver_tools.calculator import CALCULATE, calculate
from envserver_tools.calling import (
    Tool,
    ToolResult,
    cut,
    toolbox,
)
from msgspec import Meta

from envserver import Message, PublicTask, Rollout, tool

from .prompts import question, system_prompt

Mode = Literal["tools", "single", "seed0"]
MAX_TOOL_ERRORS = 10
MAX_COMMAND_CHARACTERS = 4_000
"""Longer commands are refused unread."""


@tool
def finish(answer: Annotated[str, Meta(max_length=500)]) -> str:
    """Gives the final answer and ends the task."""
    return answer


TOOLS = toolbox(Tool(CALCULATE, calculate), finish)


async def solve(task: PublicTask, run: Rollout, mode: Mode, prompt: str | None = None) -> Json:
    """Runs one attempt; `prompt` replaces the mode's system prompt, "": none."""
    system = system_prompt(mode) if prompt is None else prompt
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question(task.public)})
    match mode:
        case "tools":
            return await _with_tools(messages, run)
        case "seed0":
            return await _with_commands(messages, run)
        case "single":
            reply = await run.chat(messages)
            return {"answer": None, "text": reply.content}


async def _with_tools(messages: list[Message], run: Rollout) -> Json:
    end = await run.loop(messages, tools=TOOLS, final="finish", max_tool_errors=MAX_TOOL_ERRORS)
    return {"answer": end.result, "text": end.last_text}


async def _with_commands(messages: list[Message], run: Rollout) -> Json:
    text, errors = "", 0
    for _ in range(run.max_turns):
        reply = await run.chat(messages)
        text = reply.content
        messages.append(reply.message)
        blocks = commands_of(text)
        if reply.finish_reason == "length" or not blocks:
            break
        result = run_command(blocks)
        errors += not result.ok
        run.log_metric("tool_errors", errors)
        messages.append({"role": "user", "content": f"Output:\n{result.text}"})
        if errors >= MAX_TOOL_ERRORS:
            break
    return {"answer": None, "text": text}


_FENCE = re.compile(r"```(?:bash|sh|shell|console|python|py)?[ \t]*\r?\n(.*?)```", re.DOTALL)
_PRINT = re.compile(r"print\((.*)\)", re.DOTALL)


def commands_of(text: str) -> list[str]:
    return _FENCE.findall(text)


def run_command(blocks: list[str]) -> ToolResult:
    """Returns the output of `python -c "print(EXPRESSION)"`. Executes nothing."""
    if len(blocks) != 1:
        return ToolResult("Error: write exactly one fenced command.", ok=False)
    if len(blocks[0]) > MAX_COMMAND_CHARACTERS:
        limit = f"over {MAX_COMMAND_CHARACTERS} characters"
        return ToolResult(f"Error: the command is too long, {limit}.", ok=False)
    try:
        words = shlex.split(blocks[0])
    except ValueError as error:
        return ToolResult(f"Error: the command cannot be read: {error}.", ok=False)
    match words:
        case ["python" | "python3", "-c", code] if printed := _PRINT.fullmatch(code.strip()):
            return ToolResult(cut(calculate(printed[1])), ok=True)
    return ToolResult('Error: the only command is python -c "print(EXPRESSION)".', ok=False)
