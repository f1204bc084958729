"""The agent: a sandbox with the repository, one of three loops, and the patch at the end.

The patch is taken inside the sandbox, after the loop has submitted the repository; the model's own
account of it does not count. The loops:

    bash    one command block per message, as text; ends with a command that prints the submit word
    tools   native tool calls; ends with `submit`, or with a message without a call
    text    THOUGHT / TOOL_CALL / FINAL, as text
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from envserver_records.tasks import Json
from envserver_tools.calling import Tool, ToolError, toolbox, visible_text
from envserver_tools.loop import chat_with_tools
from envserver_tools.protocol import describe_tools, run_protocol
from envserver_tools.sandboxed import read_patch, sandbox_tools

from envserver import Message, PublicTask, Reply, Rollout, Sandbox, SandboxSpec

from .patches import MAX_PATCH_BYTES
from .prompts import system_prompt, task_prompt
from .repositories import ImageRules, Images, workspace

CONFIRM = "confirm"
"""The service that asks the user."""
COMMANDS = ("bash", "run_cmd")
_STATUS = re.compile(r"\[exit status (\d+)\]\n?")


def _watched(tool: Tool, run: Rollout, asks: bool) -> Tool:
    async def function(**arguments: Any) -> str:
        try:
            if asks and not await run.call_tool(CONFIRM, {"tool": tool.name, **arguments}):
                raise ToolError("the user refuses this command")
            said = tool.function(**arguments)
            text = said if isinstance(said, str) else await said
        except ToolError as error:
            run.log_action(tool.name, arguments, error=str(error))
            raise
        run.log_action(tool.name, arguments, _logged_output(tool.name, text))
        return text

    return dataclasses.replace(tool, function=function)


def _logged_output(name: str, text: str) -> Any:
    ended = _STATUS.match(text) if name in COMMANDS else None
    if ended is None:
        return text
    return {"returncode": int(ended[1]), "stdout": text[ended.end() :], "stderr": ""}


@dataclass(frozen=True)
class AgentOptions:
    """Options of an agent."""

    command_seconds: int = 60  # maximum duration of a command
    max_format_errors: int = 3  # malformed messages in a row before the run ends
    images: Images = field(default_factory=lambda: Images(ImageRules()))
    confirm: bool = False  # ask a person before each command
    keep_unfinished: bool = False  # the patch counts even if it was not submitted

    def tools(self, sandbox: Sandbox, run: Rollout, *names: str) -> dict[str, Tool]:
        """Tools whose calls are logged to `run`; commands ask first if `confirm`."""
        tools = sandbox_tools(sandbox, names=names, command_seconds=self.command_seconds)
        return {
            name: _watched(tool, run, self.confirm and name in COMMANDS)
            for name, tool in tools.items()
        }


SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_OPENING = re.compile(r"```(?:bash|sh|shell|console)[ \t]*\r?")
_SUBMITTED = re.compile(rf"\[exit status 0\]\s*{SUBMIT}(?:\s|$)")
_FORMAT = "Write exactly one block that begins with ```bash and ends with ```; there were {count}."


async def work_with_bash(
    messages: list[Message], sandbox: Sandbox, run: Rollout, rules: AgentOptions
) -> bool:
    """Returns whether the repository was submitted, within `run.max_turns` messages."""
    bash = rules.tools(sandbox, run, "bash")["bash"]
    errors = in_a_row = 0
    for _ in range(run.max_turns):
        reply = await run.chat(messages)
        run.log_action("reason", output=reply.content)
        messages.append(reply.message)
        if reply.finish_reason == "length":
            return False
        commands = blocks_of(visible_text(reply.content) or "")
        if len(commands) == 1:
            in_a_row = 0
            answer = await _run_bash(bash, commands[0])
            if _SUBMITTED.match(answer):
                return True
        else:
            errors, in_a_row = errors + 1, in_a_row + 1
            run.log_metric("format_errors", errors)
            if in_a_row >= rules.max_format_errors:
                return False
            answer = _FORMAT.format(count=len(commands))
        messages.append({"role": "user", "content": answer})
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


async def _run_bash(bash: Tool, command: str) -> str:
    try:
        result = bash.function(command=command)
        return result if isinstance(result, str) else await result
    except ToolError as error:
        return f"Error: {error}"


NAMES = ("read_file", "write_file", "edit", "list_dir", "grep", "bash", "git_diff")
MAX_ERRORS_IN_A_ROW = 10

SUBMIT_TOOL: Json = {
    "type": "function",
    "function": {
        "name": "submit",
        "description": "Hands the repository in as it is now and ends the task.",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}


async def work_with_tools(
    messages: list[Message], sandbox: Sandbox, run: Rollout, rules: AgentOptions
) -> bool:
    tools = rules.tools(sandbox, run, *NAMES) | toolbox(
        Tool(SUBMIT_TOOL, lambda: "The task is handed in.")
    )

    def log_text(reply: Reply) -> None:
        if reply.content:
            run.log_action("reason", output=reply.content)

    end = await chat_with_tools(
        run,
        messages,
        tools,
        final="submit",
        max_tool_errors=MAX_ERRORS_IN_A_ROW,
        errors_in_a_row=True,
        on_reply=log_text,
    )
    return end.reason in ("final_tool", "text")


async def work_in_text(
    messages: list[Message], sandbox: Sandbox, run: Rollout, rules: AgentOptions
) -> bool:
    async def chat(history: list[Message], **sampling: Any) -> Reply:
        reply = await run.chat(history, **sampling)
        run.log_action("reason", output=reply.content)
        return reply

    tools = rules.tools(sandbox, run, *NAMES)
    system = messages[0]
    system["content"] = system["content"].replace("{tools}", describe_tools(tools.values()))
    done = await run_protocol(
        chat, tools, messages, max_steps=run.max_turns, max_retries=rules.max_format_errors
    )
    run.log_metric("tool_errors", done.tool_errors)
    return done.ending == "final"


AgentKind = Literal["bash", "tools", "text"]


Loop = Callable[[list[Message], Sandbox, Rollout, AgentOptions], Awaitable[bool]]
LOOPS: dict[AgentKind, Loop] = {
    "bash": work_with_bash,
    "tools": work_with_tools,
    "text": work_in_text,
}


async def solve(task: PublicTask, run: Rollout, kind: AgentKind, rules: AgentOptions) -> Json:
    messages: list[Message] = [
        {"role": "system", "content": system_prompt(kind)},
        {"role": "user", "content": task_prompt(task.public["problem"])},
    ]
    spec, commit = await _prepared(task.public, run, rules)
    async with run.open_sandbox(spec) as sandbox:
        submitted = await LOOPS[kind](messages, sandbox, run, rules)
        run.log_metric("submitted", submitted)
        if not (submitted or rules.keep_unfinished):
            return {"patch": "", "submitted": False, "reason": "nothing was handed in"}
        return await patch_in(commit, sandbox, "") | {"submitted": submitted}


async def patch_in(commit: str, sandbox: Sandbox, words: str) -> Json:
    """Returns the output of a program that worked in the repository and has ended."""
    try:
        patch = await read_patch(sandbox, base=commit, max_bytes=MAX_PATCH_BYTES)
    except ToolError as error:
        return {"patch": "", "submitted": True, "reason": str(error)}
    return {"patch": patch.decode("utf-8", "replace"), "submitted": True, "reason": ""}


async def _prepared(public: Json, run: Rollout, rules: AgentOptions) -> tuple[SandboxSpec, str]:
    image, seconds = public.get("image", ""), rules.command_seconds
    # A large repository takes seconds; others in this process must not wait for it.
    if not image:
        return await asyncio.to_thread(workspace, public, seconds)
    files = await rules.images.files(image, run.open_sandbox)
    spec, commit = await asyncio.to_thread(workspace, public, seconds, files.tree, files.built)
    return rules.images.rules.spec(spec, image, for_agent=True), commit
