"""External agents: how each is started, and how it is installed."""

from __future__ import annotations

from typing import Final

from envserver_records.errors import NotFoundError

from .programs import (
    CLAUDE_CODE,
    CODEX,
    COMMAND,
    MINI_SWE_AGENT,
    OPENCODE,
    SMOLAGENTS,
    Harness,
)

HARNESSES: Final[dict[str, Harness]] = {
    harness.name: harness for harness in (CLAUDE_CODE, CODEX, OPENCODE, MINI_SWE_AGENT, SMOLAGENTS)
}
"""The programs that `envserver agents install` knows, by name."""


def harness_of(name: str) -> Harness:
    if name == COMMAND.name:
        return COMMAND
    if name in HARNESSES:
        return HARNESSES[name]
    raise NotFoundError(
        f"There is no agent {name!r}.",
        hint=f"Known: {', '.join(HARNESSES)}; --agent.command starts any other program.",
    )
