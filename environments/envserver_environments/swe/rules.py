"""Settings that all agents share."""

from __future__ import annotations

from dataclasses import dataclass, field

from .images import ImageRules, Images


@dataclass(frozen=True)
class AgentOptions:
    """Options of an agent.

    Args:
        command_seconds: maximum duration of a command.
        max_format_errors: malformed messages in a row before the run ends.
        images: the image files of repositories.
        confirm: ask a person before each command.
        keep_unfinished: the patch counts even if it was not submitted.
    """

    command_seconds: int = 60
    max_format_errors: int = 3
    images: Images = field(default_factory=lambda: Images(ImageRules()))
    confirm: bool = False
    keep_unfinished: bool = False
