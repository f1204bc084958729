"""Settings that all agents share."""

from __future__ import annotations

from dataclasses import dataclass, field

from .images import ImageRules, Images


@dataclass(frozen=True)
class AgentOptions:
    """How an agent may work.

    Args:
        command_seconds: the most that a command may take.
        max_format_errors: messages in a row that cannot be used, before it ends.
        images: the files of repositories in images.
        confirm: a person is asked before each command.
        keep_unfinished: the patch counts, whether it was handed in or not.
    """

    command_seconds: int = 60
    max_format_errors: int = 3
    images: Images = field(default_factory=lambda: Images(ImageRules()))
    confirm: bool = False
    keep_unfinished: bool = False
