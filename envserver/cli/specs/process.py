"""The settings of `envserver process`."""

from __future__ import annotations

from ...running.run_settings import ProcessSettings
from ..command_line import FREQUENT, CommandSpec

SUMMARY = """Runs rollouts of one or more environments and writes each finished group as a line
of JSON. Ctrl-C once finishes the open groups and stops; twice stops at once,
a third time kills. Written groups are
never lost."""


COMMAND = CommandSpec(
    "process",
    SUMMARY,
    ProcessSettings,
    usage="--env NAME[=WEIGHT,NAME=WEIGHT]",
    frequent=(
        *FREQUENT,
        "env.data_path_to_save_groups",
        "resume",
        "overwrite",
        "verbose",
        "ray.address",
        "ray.runners",
    ),
    aliases={
        "ray": "ray.address",
        "limit": "total_groups",
        "out": "env.data_path_to_save_groups",
        "o": "env.data_path_to_save_groups",
    },
    openai_variables="openai",
)
