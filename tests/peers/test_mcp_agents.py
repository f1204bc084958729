"""Claude Code and Codex list an environment's tools over MCP and call them; their model calls go
through the proxy. `make agents` installs them."""

from __future__ import annotations

import pytest
from support import mcp_desk
from support.coding_programs import program

import envserver


@pytest.mark.parametrize("name", ["claude", "codex"])
def test_an_agent_that_speaks_mcp_uses_our_tools(name: str) -> None:
    made = envserver.process(
        mcp_desk.__file__,
        model="sim",
        env={
            "total_steps": 1,
            "group_size": 1,
            "max_token_length": 32_768,
            "program": program(name),
        },
        sim={"solve_probability": 1.0, "openers": False},
    )
    (trajectory,) = made.groups[0].trajectories
    results = [one["content"] for one in trajectory.messages if one["role"] == "tool"]
    told = [text.partition("Output:\n")[2] or text for text in results]  # Codex says how long
    assert told == [
        "amber",
        "Error: the arguments of save_answer are not valid: Expected `str`, got `int` - at "
        "`answer`.",
        "Saved amber.",
    ], trajectory.output
    assert trajectory.score.reward == 1.0
    assert len(trajectory.sequences) == 1 and trajectory.metrics["tool_errors"] == 1
