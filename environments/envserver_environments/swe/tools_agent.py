"""The loop with tool calls: files, search, commands, and `submit`.

It ends with `submit`, or with a message that calls nothing: what stands then is handed in. Broken
calls are answered with what is wrong; after some of them in a row the loop ends.
"""

from __future__ import annotations

from typing import Any

from envserver_tools.calling import Tool, call_tool, descriptions, toolbox
from envserver_tools.sandboxed import sandbox_tools

from envserver import Message, Rollout, Sandbox

from .prompts import system_prompt
from .rules import Rules
from .watching import watched

NAMES = ("read_file", "write_file", "edit", "list_dir", "grep", "bash", "git_diff")
MAX_ERRORS_IN_A_ROW = 10

SUBMIT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "submit",
        "description": "Hands the repository in as it is now and ends the task.",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}


async def work(messages: list[Message], sandbox: Sandbox, run: Rollout, rules: Rules) -> bool:
    """Whether the repository was handed in, in at most `run.max_turns` messages."""
    history = [{"role": "system", "content": system_prompt("tools")}, *messages]
    tools = sandbox_tools(sandbox, names=NAMES, command_seconds=rules.command_seconds)
    tools = watched(tools, run, rules.confirm)
    tools |= toolbox(Tool(SUBMIT, lambda: "The task is handed in."))
    errors = in_a_row = 0
    for _ in range(run.max_turns):
        reply = await run.chat(history, tools=descriptions(tools.values()))
        history.append(reply.message)
        if reply.content:
            run.log_action("reason", output=reply.content)
        if reply.finish_reason == "length":
            return False
        if not reply.tool_calls:
            return True
        for call in reply.tool_calls:
            result = await call_tool(tools, call)
            if result.ok and call["function"]["name"] == "submit":
                return True
            in_a_row = 0 if result.ok else in_a_row + 1
            errors += not result.ok
            answer = {"role": "tool", "tool_call_id": call.get("id", ""), "content": result.text}
            history.append(answer)
        run.log_metric("tool_errors", errors)
        if in_a_row >= MAX_ERRORS_IN_A_ROW:
            return False
    return False
