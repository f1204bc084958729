"""The loop with nothing but bash: the model writes one command block per message.

A message without exactly one block is answered with the format; after some of these in a row the
loop ends. A command whose first line of output is the submit word submits the repository.
"""

from __future__ import annotations

import re

from envserver_tools.calling import Tool, ToolError
from envserver_tools.sandboxed import sandbox_tools
from envserver_tools.visible import visible_text

from envserver import Message, Rollout, Sandbox

from .prompts import system_prompt
from .rules import AgentOptions
from .watching import watched

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_OPENING = re.compile(r"```(?:bash|sh|shell|console)[ \t]*\r?")
_SUBMITTED = re.compile(rf"\[exit status 0\]\s*{SUBMIT}(?:\s|$)")
_FORMAT = "Write exactly one block that begins with ```bash and ends with ```; there were {count}."


async def work(
    messages: list[Message], sandbox: Sandbox, run: Rollout, rules: AgentOptions
) -> bool:
    """Returns whether the repository was submitted, within `run.max_turns` messages."""
    history = [{"role": "system", "content": system_prompt("bash")}, *messages]
    tools = sandbox_tools(sandbox, names=["bash"], command_seconds=rules.command_seconds)
    bash = watched(tools, run, rules.confirm)["bash"]
    errors = in_a_row = 0
    for _ in range(run.max_turns):
        reply = await run.chat(history)
        run.log_action("reason", output=reply.content)
        history.append(reply.message)
        if reply.finish_reason == "length":
            return False
        commands = blocks_of(visible_text(reply.content) or "")
        if len(commands) == 1:
            in_a_row = 0
            answer = await _output(bash, commands[0])
            if _SUBMITTED.match(answer):
                return True
        else:
            errors, in_a_row = errors + 1, in_a_row + 1
            run.log_metric("format_errors", errors)
            if in_a_row >= rules.max_format_errors:
                return False
            answer = _FORMAT.format(count=len(commands))
        history.append({"role": "user", "content": answer})
    return False


def blocks_of(text: str) -> list[str]:
    """Returns the fenced commands of a message, in one pass over its lines."""
    blocks: list[str] = []
    inside: list[str] | None = None
    for line in text.split("\n"):
        if inside is None:
            inside = [] if _OPENING.fullmatch(line) else None
        elif line.rstrip(" \t") == "```":
            blocks.append("".join(inside))
            inside = None
        else:
            inside.append(f"{line}\n")
    return blocks


async def _output(bash: Tool, command: str) -> str:
    try:
        result = bash.function(command=command)
        return result if isinstance(result, str) else await result
    except ToolError as error:
        return f"Error: {error}"
