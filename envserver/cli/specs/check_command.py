"""The settings of `envserver check`."""

from __future__ import annotations

from ...running.run_settings import CheckSettings
from ..command_line import CommandSpec

SUMMARY = """Checks an environment without a model: the simulated engine plays demonstrations
through its rollout, rightly and wrongly; correct results get the expected score; empty, absurd and
cheating results get nothing; tasks are the same each time they are listed and do not show hidden
fields. All rows of your own data are looked at: the fields that were taken, dropped and doubtful
rows, the answers, repeated questions, lengths. Exit status 0: all checks pass; 1: a check fails; 2:
the command line is wrong."""


COMMAND = CommandSpec(
    "check",
    SUMMARY,
    CheckSettings,
    usage="NAME",
    arguments=("environment",),
    frequent=(
        *("environment", "env.split", "env.seed", "tasks", "plays", "processes"),
        *("rows", "evaluation_set", "tokenizer", "context_tokens", "markdown", "card", "as_json"),
        *("sandbox.backend", "log_level"),
    ),
)
