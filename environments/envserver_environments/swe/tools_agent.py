"""The loop with tool calls: files, search, commands, and `submit`.

It ends with `submit`, or with a message without a call: the repository as it is then is submitted.
Broken calls are answered with the error; after some of them in a row the loop ends.
"""

from __future__ import annotations

from typing import Any

from envserver_tools.calling import Tool, toolbox
from envserver_tools.loop import chat_with_tools
from envserver_tools.sandboxed import sandbox_tools

from envserver import Message, Reply, Rollout, Sandbox

from .prompts import system_prompt
from .rules import AgentOptions
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


async def work(
    messages: list[Message], sandbox: Sandbox, run: Rollout, rules: AgentOptions
) -> bool:
    """Returns whether the repository was submitted, within `run.max_turns` messages."""
    history = [{"role": "system", "content": system_prompt("tools")}, *messages]
    tools = sandbox_tools(sandbox, names=NAMES, command_seconds=rules.command_seconds)
    tools = watched(tools, run, rules.confirm)
    tools |= toolbox(Tool(SUBMIT, lambda: "The task is handed in."))

    def log_text(reply: Reply) -> None:
        if reply.content:
            run.log_action("reason", output=reply.content)

    end = await chat_with_tools(
        run,
        history,
        tools,
        final="submit",
        max_tool_errors=MAX_ERRORS_IN_A_ROW,
        errors_in_a_row=True,
        on_reply=log_text,
    )
    return end.reason in ("final_tool", "text")
