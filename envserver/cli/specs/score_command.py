"""The settings of `envserver score`."""

from __future__ import annotations

from ...running.run_settings import ScoreSettings
from ..command_line import CommandSpec

SUMMARY = """Scores rows {"task": a row of a data set or a task id, "response": "text"} (or a row
with "messages") without a model: writes reward, components, metrics and error of each, in order.
Exit status 0: no row has an error; 1: at least one has; 2: the command line is wrong."""


COMMAND = CommandSpec(
    "score",
    SUMMARY,
    ScoreSettings,
    usage="--env NAME --input FILE --out FILE",
    frequent=("environment", "input", "out", "processes", "sandbox.backend", "log_level"),
)
