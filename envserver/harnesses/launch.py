"""How a program is started: its task (`Session`), and its command line (`Launch`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from ..rollout_interface import HarnessSpec

WORDS_FILE: Final = "words.txt"
"""File of HOME for a program's last words, if they are not the model's last message."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """What a program gets for one rollout.

    Args:
        home: its own HOME, empty.
        workspace: the folder that it works in; its current folder.
        base_url: of the proxy, with `/v1`; valid for this rollout, like `api_key`.
        instruction: what it is to do, also in `instruction_file`.
        mcp_url: of the MCP server with the environment's tools; "": none.
        skills: files of skills by path.
    """

    spec: HarnessSpec
    home: Path
    workspace: Path
    base_url: str
    api_key: str
    model: str
    instruction: str
    instruction_file: Path
    mcp_url: str = ""
    skills: Mapping[str, str] = field(default_factory=dict)

    @property
    def root_url(self) -> str:
        """The proxy's address without `/v1`, as Anthropic's clients want it."""
        return self.base_url.removesuffix("/v1")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A program to start.

    Args:
        argv: its command line; a program without a slash is looked for in PATH.
        env: variables besides PATH, HOME and the like.
        files: files of its HOME, by path.
        words_file: file of its HOME for its last words; without one they are the model's last
            message.
    """

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    words_file: str = ""


@dataclass(frozen=True, kw_only=True)
class Package:
    registry: Literal["npm", "pypi"]
    name: str
    version: str


@dataclass(frozen=True, kw_only=True)
class Harness:
    """An external agent. `package`: None for programs of the user."""

    name: str
    launch: Callable[[Session], Launch]
    package: Package | None = None


def skill_files(skills: Mapping[str, str], folder: str) -> dict[str, str]:
    return {f"{folder}/{path}": text for path, text in skills.items()}
