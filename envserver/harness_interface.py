"""What an environment and a program that plays its agent have in common.

An environment says what the program gets for a task (`HarnessTask`); the server says which program
it is (`HarnessSpec`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from .sandbox_interface import Sandbox
from .tools.sources import Tools

FOREIGN_AGENT = "foreign_agent"
"""Flag of rollouts that another program played."""
OutputReader = Callable[[Sandbox, str], Awaitable[Any]]
"""Reads a rollout's output from the workspace and the program's last words."""


@dataclass(frozen=True, kw_only=True)
class HarnessTask:
    """What a program gets that plays the agent on one task (see `Environment.harness_task`).

    Args:
        instruction: what it is to do; its first message.
        archive: a tar file that is unpacked into its workspace, /work.
        files: more files of the workspace, by path.
        tools: offered to it by an MCP server, if it knows MCP; None: no tools of ours.
        skills: files of the skills that it may read, by path ("sorting/SKILL.md").
        output: reads the output once the program has ended; unset: its last words. The program
            shares the worker, so `score` must not trust what was computed in there
            (`result.flags` holds "foreign_agent").
    """

    instruction: str
    archive: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    tools: Tools | None = None
    skills: Mapping[str, str] = field(default_factory=dict)
    output: OutputReader | None = None


class HarnessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The program that plays the agents of a run.

    Args:
        name: a harness that we know, "command", or "url".
        version: of the installed program; "" if unknown.
        place: the folder of the installed program, as agents see it.
        command: the command line, for "command".
        url: its address, for "url".
        base_url: where it reaches the proxy, for "url"; "": at the proxy's own address.
        arguments: further arguments of its command line.
        output_bytes: how much of what it prints is kept.
    """

    name: str
    version: str = ""
    place: str = ""
    command: str = ""
    url: str = ""
    base_url: str = ""
    arguments: list[str] = []
    output_bytes: int = 64 * 1024

    def identity(self) -> dict[str, str]:
        """Returns what identifies it in records."""
        facts = {"name": self.name, "version": self.version, "command": self.command}
        facts |= {"url": self.url, "arguments": " ".join(self.arguments)}
        return {key: value for key, value in facts.items() if value}
