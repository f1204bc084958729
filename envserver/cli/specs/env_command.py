"""The settings of `envserver env install`, `env list`, `env remove` and `env push`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from ...config import Section
from ..command_line import CommandSpec


class InstallSettings(Section):
    """Settings of `env install`."""

    source: str
    """A project's folder, a wheel, git+https://...[@revision], hub:owner/name[@revision], or an
    environment of another framework, SCHEME:NAME."""
    packages: list[str] = Field(default_factory=list)
    """With SCHEME:NAME: what pip installs beside the framework: a path, a wheel, a requirement.
    May be repeated."""
    interpreter: Literal["auto", "shared", "own"] = "auto"
    """shared: envserver's Python; own: a virtual environment; auto: own if its dependencies are not
    met here."""
    replace: bool = False
    """Install over an installed package of that name."""


class ListSettings(Section):
    """`env list` has no settings."""


class RemoveSettings(Section):
    """Settings of `env remove`."""

    name: str
    """Name of the package, or of one of its environments."""


class PushSettings(Section):
    """Settings of `env push`."""

    project: Path
    """Folder of the project, with pyproject.toml and environment.yaml."""
    to: str
    """OWNER/NAME on the hub."""
    dry_run: bool = False
    """Check everything and list the files, and upload nothing."""


INSTALL = CommandSpec(
    "env install",
    "Installs a package of environments, in its own virtual environment if its dependencies ask "
    "for one.",
    InstallSettings,
    usage="SOURCE",
    arguments=("source",),
    aliases={"with": "packages"},
)
LIST = CommandSpec("env list", "Lists the packages that `env install` installed.", ListSettings)
REMOVE = CommandSpec(
    "env remove",
    "Removes an installed package with its virtual environment.",
    RemoveSettings,
    usage="NAME",
    arguments=("name",),
)
PUSH = CommandSpec(
    "env push",
    "Uploads a project to the hub, so that `env install hub:OWNER/NAME` finds it. Without a token "
    "of the hub it is a dry run.",
    PushSettings,
    usage="PROJECT --to OWNER/NAME",
    arguments=("project",),
)
