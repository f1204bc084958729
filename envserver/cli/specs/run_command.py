"""The settings of `envserver run`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from envserver_records.errors import ConfigError
from pydantic import create_model

from ...running.run_settings import RunSettings
from ..command_line import ENGINE, SAMPLING, CommandSpec

if TYPE_CHECKING:
    from ...environment import Environment

SUMMARY = """Asks an environment's agent one question and writes a unified trajectory: readable
actions, the final answer, and the reward if the expected answer is known."""


def settings_for(environment: type[Environment]) -> type[RunSettings]:
    """Returns the settings of `run` with the fields of the environment's question.

    Raises:
        ConfigError: a field has the name of a setting.
    """
    asked = environment.Question
    if taken := set(asked.model_fields) & set(RunSettings.model_fields):
        raise ConfigError(
            f"A question of this environment has a field {min(taken)!r}, which is a setting.",
            hint="Give it another name.",
        )
    fields: dict[str, Any] = {
        name: (field.annotation, field) for name, field in asked.model_fields.items()
    }
    return create_model("RunSettings", __base__=RunSettings, **fields)


COMMAND = CommandSpec(
    "run",
    SUMMARY,
    RunSettings,
    usage="--env NAME --question TEXT",
    frequent=("environment", *ENGINE, "env.max_token_length", *SAMPLING, "out", "include_tokens"),
    settings_for=settings_for,
)
