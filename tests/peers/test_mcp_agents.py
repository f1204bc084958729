"""Claude Code and Codex list an environment's tools over MCP and call them; their model calls go
through the proxy. `npm install @anthropic-ai/claude-code@2.1.197 @openai/codex@0.169.0` in the
folder `.agents`, or anywhere on PATH."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support import mcp_desk

import envserver

ROOT = Path(__file__).parents[2]


def program(name: str) -> str:
    folders = [*os.environ["PATH"].split(os.pathsep), str(ROOT / ".agents/node_modules/.bin")]
    found = shutil.which(name, path=os.pathsep.join(folders))
    if found is None:
        pytest.skip(f"{name} is missing: see {Path(__file__).name}")
    return found


NAMESPACE = pytest.mark.skip("the proxy refuses its tools, which are of the type namespace")


@pytest.mark.parametrize("name", ["claude", pytest.param("codex", marks=NAMESPACE)])
def test_an_agent_that_speaks_mcp_uses_our_tools(name: str) -> None:
    made = envserver.process(
        mcp_desk.__file__,
        model="sim",
        env={"total_steps": 1, "group_size": 1, "program": program(name)},
        sim={"solve_probability": 1.0, "openers": False},
    )
    (trajectory,) = made.groups[0].trajectories
    told = [one["content"] for one in trajectory.messages if one["role"] == "tool"]
    assert told == [
        "amber",
        "Error: the arguments of save_answer are not valid: Expected `str`, got `int` - at "
        "`answer`.",
        "Saved amber.",
    ], trajectory.output
    assert trajectory.score.reward == 1.0
    assert len(trajectory.sequences) == 1 and trajectory.metrics["tool_errors"] == 1
