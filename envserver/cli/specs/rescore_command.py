"""The settings of `envserver rescore`."""

from __future__ import annotations

from ...running.run_settings import RescoreSettings
from ..command_line import CommandSpec

SUMMARY = """Scores stored rollouts again with the environment or another rubric; no policy
is called. `envserver rescore FILE... --env NAME --out FILE` writes the same lines with new scores,
the old scores as `rescored_from`, and prints how they differ. Rollouts whose scoring fails
through no fault of the model are left out and counted, never scored 0. Exit status 1: something
failed, or nothing was scored."""


COMMAND = CommandSpec(
    "rescore",
    SUMMARY,
    RescoreSettings,
    usage="FILE... --env NAME --out FILE",
    arguments=("source",),
    frequent=(
        *("source", "environment", "out", "rubric", "resume", "overwrite", "skip_bad"),
        *("without_messages", "processes", "sandbox.backend", "log_level"),
    ),
)
