"""Agents that solve a question with files: smolagents' two, and a plain loop as a baseline.
Importing this package imports smolagents, if it is installed, for workers that are forked
afterwards."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import time
from collections.abc import Sequence
from functools import cache

from envserver_records.extras import install_command
from envserver_records.tasks import Json
from envserver_tools.calling import Tool

from envserver import ConfigError, PublicTask, Rollout

from .plain import AgentOptions, AgentRun, Ending, Kind, PlainRun, Prompts, Solved
from .prompts import question

__all__ = ["Ending", "Kind", "AgentOptions", "Prompts", "Solved", "solve"]

LEAVE_SECONDS = 2.5
"""An agent ends this long before the rollout's deadline, so that its steps are not lost."""
MOST_LEFT = 0.25
"""Share of the rollout's time that this may be."""
STOP_SECONDS = 5.0


async def solve(
    task: PublicTask,
    run: Rollout,
    rules: AgentOptions,
    tools: Sequence[Tool] = (),
    extra: Json | None = None,
) -> Json:
    """Runs one attempt at `task`; its files are in the current directory.

    Args:
        task: `public` holds `question`, and `files`: their names, or objects with a `name`.
        tools: besides python and final_answer.
        extra: additional fields of each request to the model.

    Returns:
        {"answer": a text or None, "state": see `Ending`, "steps": see `step_data`}.
    """
    rules.check()
    seconds = run.deadline - time.time()
    stop_at = run.deadline - min(LEAVE_SECONDS, MOST_LEFT * seconds)
    if rules.seconds is not None:
        stop_at = min(stop_at, time.time() + rules.seconds)
    kind = PlainRun if rules.agent == "plain" else _smol_run()
    agent = kind(run, rules, tools, loop=asyncio.get_running_loop(), stop_at=stop_at, extra=extra)
    thread = asyncio.ensure_future(asyncio.to_thread(agent.run, question(task.public)))
    try:
        return (await asyncio.shield(thread)).as_output()
    except asyncio.CancelledError:
        agent.stop()
        await asyncio.wait({thread}, timeout=STOP_SECONDS)
        raise


@cache
def _smol_run() -> type[AgentRun]:
    if importlib.util.find_spec("smolagents") is None:
        raise ConfigError(
            "smolagents is not installed.",
            hint=f"{install_command('gaia')}, or take the agent `plain`.",
        )
    variables = dict(os.environ)
    from .smol import SmolRun

    os.environ.clear()  # smolagents reads the .env of whatever folder it finds one in
    os.environ.update(variables)
    return SmolRun


if importlib.util.find_spec("smolagents") is not None:
    _smol_run()
