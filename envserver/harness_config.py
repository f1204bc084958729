"""`--agent.*`: the external agent of a run."""

from __future__ import annotations

import shlex
from pathlib import Path

from pydantic import Field, field_validator, model_validator

from .described import Section


class HarnessConfig(Section):
    """The program that plays the agents, instead of the environment's own rollout."""

    name: str | None = None
    """An installed program: claude-code, codex, opencode, mini-swe-agent or smolagents (`envserver
    agents list`); unset: the environment's own agent."""
    command: str | None = None
    """Command line of any other program; {instruction_file}, {instruction}, {base_url}, {api_key},
    {model} and {mcp_url} are replaced, and OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and
    ANTHROPIC_API_KEY are set."""
    url: str | None = None
    """Address of an agent that already runs: it gets each task by POST, and answers with its
    output."""
    base_url: str | None = None
    """With agent.url, where the agent reaches agent.port of this machine (the end of a tunnel):
    http://127.0.0.1:9200; unset: it is on this machine."""
    port: int = Field(default=0, ge=0, le=65535)
    """Loopback port at which agents ask the model, for a tunnel; 0: any."""
    folder: Path | None = None
    """Folder of a program of yours, shown to it as {folder}; for an installed program, the folder
    of all installed ones."""
    arguments: list[str] = []
    """Further arguments of the program's command line."""
    output_kb: int = Field(default=64, ge=1, le=1024)
    """Kilobytes of what the program prints that are kept with the rollout: its beginning and its
    end."""

    @model_validator(mode="after")
    def _is_one(self) -> HarnessConfig:
        if sum(one is not None for one in (self.name, self.command, self.url)) > 1:
            raise ValueError("give one of agent.name, agent.command and agent.url")
        if self.base_url is not None and not (self.url and self.port):
            raise ValueError("agent.base_url needs agent.url and agent.port")
        return self

    @field_validator("command")
    @classmethod
    def _has_words(cls, command: str | None) -> str | None:
        try:
            if command is not None and not shlex.split(command):
                raise ValueError("is empty")
        except ValueError as error:
            raise ValueError(f"is not a command line: {error}") from None
        return command

    @property
    def is_set(self) -> bool:
        """Returns whether a program plays the agents."""
        return any(one is not None for one in (self.name, self.command, self.url))
