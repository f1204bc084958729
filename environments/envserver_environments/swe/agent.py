"""The agent: a sandbox with the repository, one of three loops, and the patch at the end.

In: a task's public part, and `run`. Out: `{"patch", "submitted", "reason"}`. The patch is taken
inside the sandbox, and only after the loop has submitted the repository; the model's own account of
it does not count. The loops:

    bash    one command block per message, as text
    tools   native tool calls
    text    THOUGHT / TOOL_CALL / FINAL, as text
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from envserver_tools.calling import ToolError
from envserver_tools.sandboxed import read_patch

from envserver import Message, PublicTask, Rollout, Sandbox, SandboxSpec

from . import bash_agent, text_agent, tools_agent
from .patches import MAX_PATCH_BYTES
from .prompts import task_prompt
from .repositories import workspace
from .rules import AgentOptions

AgentKind = Literal["bash", "tools", "text"]


Loop = Callable[[list[Message], Sandbox, Rollout, AgentOptions], Awaitable[bool]]
"""Works in the sandbox; whether the repository was handed in."""
LOOPS: dict[AgentKind, Loop] = {
    "bash": bash_agent.work,
    "tools": tools_agent.work,
    "text": text_agent.work,
}


async def solve(
    task: PublicTask, run: Rollout, kind: AgentKind, rules: AgentOptions
) -> dict[str, Any]:
    """Runs one attempt at `task`."""
    messages: list[Message] = [{"role": "user", "content": task_prompt(task.public["problem"])}]
    spec, commit = await _prepared(task.public, run, rules)
    async with run.open_sandbox(spec) as sandbox:
        submitted = await LOOPS[kind](messages, sandbox, run, rules)
        run.log_metric("submitted", submitted)
        if not (submitted or rules.keep_unfinished):
            return {"patch": "", "submitted": False, "reason": "nothing was handed in"}
        try:
            patch = await read_patch(sandbox, base=commit, max_bytes=MAX_PATCH_BYTES)
        except ToolError as error:
            return {"patch": "", "submitted": submitted, "reason": str(error)}
    return {"patch": patch.decode("utf-8", "replace"), "submitted": submitted, "reason": ""}


async def patch_in(commit: str, sandbox: Sandbox, words: str) -> dict[str, Any]:
    """Returns the output of a program that worked in the repository and has ended."""
    try:
        patch = await read_patch(sandbox, base=commit, max_bytes=MAX_PATCH_BYTES)
    except ToolError as error:
        return {"patch": "", "submitted": True, "reason": str(error)}
    return {"patch": patch.decode("utf-8", "replace"), "submitted": True, "reason": ""}


async def _prepared(
    public: dict[str, Any], run: Rollout, rules: AgentOptions
) -> tuple[SandboxSpec, str]:
    """The agent's sandbox, and the id of its one commit."""
    image, seconds = public.get("image", ""), rules.command_seconds
    # A large repository takes seconds; others in this process must not wait for it.
    if not image:
        return await asyncio.to_thread(workspace, public, seconds)
    files = await rules.images.files(image, run.open_sandbox)
    spec, commit = await asyncio.to_thread(workspace, public, seconds, files.tree, files.built)
    return rules.images.rules.spec(spec, image, for_agent=True), commit
