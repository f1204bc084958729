"""The settings of `envserver rescore`."""

from __future__ import annotations

from ...running.run_settings import RescoreSettings
from ..command_line import CommandSpec

SUMMARY = """Scores stored rollouts again, by the environment or another rubric; no model is asked.
`envserver rescore FILE... --env NAME --out FILE`: the same lines with new scores, the old ones as
`rescored_from`, and how they differ. What fails by no fault of the model is left out and counted,
never a 0. Exit status 1 where something failed, or nothing was scored."""


COMMAND = CommandSpec(
    "rescore",
    SUMMARY,
    RescoreSettings,
    usage="FILE... --env NAME --out FILE",
    arguments=("source",),
)
