"""The settings of `envserver sft router|math|code generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from ...config import Settings
from ..command_line import ENGINE, SAMPLING, CommandSpec

_ENDS = """Answers are kept in OUT/groups.jsonl: after a stop or a crash --resume goes on, and asks
nothing again but what was in flight. OUT/rows.jsonl has the rows at the end."""

ALIASES = {
    "queries": "env.data_path",
    "teacher": "openai.model_name",
    "k": "env.group_size",
    "profile": "env.profile",
    "retries": "env.repair",
    "skip_bad": "env.skip_bad",
    "limit": "env.total_steps",
}


class GenerateSettings(Settings):
    """Settings that `sft router generate`, `sft math generate` and `sft code generate` share."""

    out: Path
    """Output folder."""
    resume: bool = False
    """Go on in an existing folder: what has an answer is not asked again."""
    overwrite: bool = False
    """Replace the files of an existing folder."""


class RouterGenerateSettings(GenerateSettings):
    """Settings of `sft router generate`."""

    out: Path = Path("data/router-plans")
    rows: int | None = Field(default=None, ge=1)
    """Maximum number of rows; unset: all that are usable."""
    balance: Literal["none", "route", "difficulty", "both"] = "none"
    """Choose the rows (`rows`) so that routes, difficulties, or both together are equally
    frequent, as far as there are enough."""
    balance_seed: int = 7
    """Seed of that choice."""


class SolutionSettings(GenerateSettings):
    """Settings of `sft math generate` and `sft code generate`."""

    out: Path = Path("data/solutions")
    per_group: Literal["all", "best", "shortest"] = "shortest"
    """Right solutions that are kept of a problem's tries: all different ones, or one."""


_FREQUENT = (*ENGINE, *SAMPLING, "rollouts.max_concurrent", "prices.prompt", "prices.completion")
_OUTPUT = ("out", "resume", "overwrite")


ROUTER = CommandSpec(
    "sft router generate",
    f"""Lets a teacher write plans for queries, in strict JSON; the environment `router` checks
them by schema and as graphs. Each query and each plan occurs once.
{_ENDS}
`envserver sft router OUT/rows.jsonl` splits them. Several teachers, each with an equal share:
--teacher A,B@http://host:8000/v1. Here the defaults of --k (tries of a query), --retries (of an
invalid plan) and --sampling.max_tokens are 1, 2 and 4096.""",
    RouterGenerateSettings,
    usage="--queries FILE --teacher MODEL",
    aliases=ALIASES,
    environment="router",
    frequent=(
        *(*_OUTPUT, "rows", "balance", "env.group_size", "env.total_steps"),
        *_FREQUENT,
    ),
    openai_variables="openai",
)


def _solutions(name: str, checked: str) -> CommandSpec[SolutionSettings]:
    """Declares `sft NAME generate`."""
    return CommandSpec(
        f"sft {name} generate",
        f"""Lets a teacher try each problem of the environment `{name}` k times (8) and keeps the
conversations with a right answer, {checked}: rejection sampling.
{_ENDS}
It is `process --env {name} --env.group_size K`, then `export --to messages --min_reward 1
--per_group shortest --dedupe`.""",
        SolutionSettings,
        usage="--queries FILE --teacher MODEL --k K",
        aliases=ALIASES,
        environment=name,
        frequent=(
            *(*_OUTPUT, "per_group", "env.group_size", "env.total_steps"),
            *_FREQUENT,
        ),
        openai_variables="openai",
    )


MATH = _solutions("math", "compared by the math scorer")
CODE = _solutions("code", "run against the problem's tests in a sandbox")
