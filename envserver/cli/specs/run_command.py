"""The settings of `envserver run`."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

from envserver_records.errors import ConfigError
from pydantic import create_model
from pydantic.fields import FieldInfo

from ...described import descriptions
from ...running.run_settings import RunSettings
from ..command_line import ENGINE, SAMPLING, CommandSpec

if TYPE_CHECKING:
    from ...environment import Environment

SUMMARY = """Runs an environment's agent once, on a question or on one of its tasks (--task ID), and
writes a unified trajectory: readable actions, the final answer, and the reward if the expected
answer is known. To find a mistake: --debug, --watch, --interactive."""


def settings_for(environment: type[Environment]) -> type[RunSettings]:
    """Returns the settings of `run` with the fields of the environment's question, none of them
    required: there may be a task instead.
    Raises ConfigError: a field has the name of a setting.
    """
    asked = environment.Question
    if taken := set(asked.model_fields) & set(RunSettings.model_fields):
        raise ConfigError(
            f"A question of this environment has a field {min(taken)!r}, which is a setting.",
            hint="Give it another name.",
        )
    texts = descriptions(asked)
    fields = {name: _optional(field, texts.get(name)) for name, field in asked.model_fields.items()}
    return create_model("RunSettings", __base__=RunSettings, **fields)


def _optional(field: FieldInfo, description: str | None) -> Any:
    """Returns the definition of a field as one that may be left out."""
    annotation: Any = field.annotation
    optional = copy(field)
    optional.description = description
    if not field.is_required():
        return annotation, optional
    optional.default = None
    return annotation | None, optional


COMMAND = CommandSpec(
    "run",
    SUMMARY,
    RunSettings,
    usage="--env NAME (--question TEXT | --task ID)",
    frequent=(
        *("environment", "task", "debug", "watch", "interactive", "verbose", *ENGINE),
        *("env.max_token_length", *SAMPLING, "out", "include_tokens"),
    ),
    settings_for=settings_for,
    openai_variables="openai",
)
