"""The loop with tools in plain text: THOUGHT, TOOL_CALL, FINAL. See `envserver_tools.protocol`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from envserver_tools.protocol import describe_tools, run_protocol
from envserver_tools.sandboxed import sandbox_tools

from envserver import Message, Reply, Rollout, Sandbox

from .prompts import system_prompt
from .rules import AgentOptions
from .tools_agent import NAMES
from .watching import watched


async def work(
    messages: list[Message], sandbox: Sandbox, run: Rollout, rules: AgentOptions
) -> bool:
    """Returns whether the model reached FINAL, within `run.max_turns` messages."""
    tools = sandbox_tools(sandbox, names=NAMES, command_seconds=rules.command_seconds)
    tools = watched(tools, run, rules.confirm)
    system = system_prompt("text").replace("{tools}", describe_tools(tools.values()))
    history: list[Message] = [{"role": "system", "content": system}, *messages]
    done = await run_protocol(
        _heard(run),
        tools,
        history,
        max_steps=run.max_turns,
        max_retries=rules.max_format_errors,
    )
    run.log_metric("tool_errors", done.tool_errors)
    return done.ending == "final"


def _heard(run: Rollout) -> Callable[..., Awaitable[Reply]]:
    """Calls `run.chat` and logs the model's message as an action."""

    async def chat(messages: list[Message], **sampling: Any) -> Reply:
        reply = await run.chat(messages, **sampling)
        run.log_action("reason", output=reply.content)
        return reply

    return chat
