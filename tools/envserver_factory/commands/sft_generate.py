"""`envserver sft router|math|code generate`: a teacher's answers become rows for fine-tuning.

A run of the environment of that name, as `process` makes it, is the whole generation; then its
groups become rows: plans by `sft_building`, solutions by `envserver export`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from envserver_records.errors import ConfigError, UsageError
from pydantic import Field

from envserver.cli import lean_imports
from envserver.cli.command_line import ENGINE, SAMPLING, CommandSpec
from envserver.settings.config import Settings
from envserver.settings.section import AgentConfig

if TYPE_CHECKING:
    from envserver.running.group_run import GroupRun


_ENDS = """Answers are kept in OUT/groups.jsonl: after a stop or a crash --resume continues, and
repeats only the requests that were in flight. OUT/rows.jsonl has the rows at the end."""

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
    out: Path
    """Output folder."""
    resume: bool = False
    """Continue in an existing folder: requests that have an answer are not repeated."""
    overwrite: bool = False
    """Replace the files of an existing folder."""


class RouterGenerateSettings(GenerateSettings):
    out: Path = Path("data/router-plans")
    rows: int | None = Field(default=None, ge=1)
    """Maximum number of rows; unset: all that are usable."""
    balance: Literal["none", "route", "difficulty", "both"] = "none"
    """Choose the rows (`rows`) so that routes, difficulties, or both together are equally
    frequent, as far as there are enough."""
    balance_seed: int = 7
    """Seed of that choice."""


class SolutionSettings(GenerateSettings):
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

G = TypeVar("G", bound=GenerateSettings)
Json = dict[str, Any]

_PLANS: Json = {"data_set": "queries", "profile": "coursegpt", "group_size": 1, "repair": 2}
_TRIES: Json = {"group_size": 8, "mode": "single"}
_LONG_ANSWERS: Json = {"max_tokens": 4096}
_RIGHT = 0.999
"""Minimum reward of a right solution, because rewards are floats."""


def run_router(argv: list[str]) -> int:
    """Returns 1 if it made no rows, 130 if it was stopped early."""
    settings = _read(ROUTER, argv, _PLANS)
    if settings.balance != "none" and settings.rows is None:
        raise UsageError("--balance needs --rows N, the number of rows that are chosen.")
    if settings.resume:
        _check_profile(settings)
    if _generate(_with_teachers(settings)).stopped:
        return 130
    return 0 if _write_plans(settings) else 1


def _check_profile(settings: RouterGenerateSettings) -> None:
    """Refuses a folder with plans of another profile: all rows have the same keys."""
    from envserver.export.stored import read_groups

    path, profile = _groups(settings), dict(settings.env)["profile"]
    first = next(read_groups([str(path)]), None) if path.exists() else None
    if first is not None and first.public.get("profile") != profile:
        raise ConfigError(
            f"{path} has plans of another profile than {profile!r}.",
            hint="Use the earlier --profile, or choose another --out.",
        )


def run_math(argv: list[str]) -> int:
    return _solve(MATH, argv)


def run_code(argv: list[str]) -> int:
    return _solve(CODE, argv)


def _solve(command: CommandSpec[SolutionSettings], argv: list[str]) -> int:
    from . import export

    settings = _read(command, argv, _TRIES)
    if _generate(settings).stopped:
        return 130
    words = [str(_groups(settings)), "--to", "messages", "--out", str(settings.out / "rows.jsonl")]
    words += ["--min_reward", str(_RIGHT), "--per_group", settings.per_group]
    return export.run([*words, "--dedupe", "true", "--overwrite", "true"])


def _read(command: CommandSpec[G], argv: list[str], environment: Mapping[str, Any]) -> G:
    """Reads the settings. A teacher called "sim" is the simulated engine, as everywhere."""
    from envserver.cli.loop import show_logs
    from envserver.running.engines import SIMULATED

    defaults = {"env": environment, "sampling": _LONG_ANSWERS}
    settings = command.read(argv, defaults=defaults)
    if settings.openai.model_name == SIMULATED:
        settings = settings.model_copy(update={"model": SIMULATED})
    show_logs(settings)
    return settings


def _with_teachers(settings: RouterGenerateSettings) -> RouterGenerateSettings:
    """Makes each further teacher of `A,B@http://host:8000/v1` an agent; the first has the run's
    engine.
    """
    found = [re.fullmatch(r"\s*(.+?)(?:@(https?://.+?))?\s*", part) for part in
             settings.openai.model_name.split(",")]  # fmt: skip
    teachers = [(one[1], one[2]) for one in found if one is not None]
    if len(teachers) < len(found):
        raise ConfigError("--teacher: a name is missing between two commas.")
    first, url = teachers[0]
    openai = {"model_name": first} | ({} if url is None else {"base_url": url})
    env = settings.env
    if len(teachers) > 1:
        agents = {**env.agents}
        for number, (model, url) in enumerate(teachers[1:], 2):
            own = {"model_name": model}
            if url is not None:
                own |= {"base_url": url, "server_type": settings.openai.server_type}
            known = agents.get(f"teacher_{number}", AgentConfig())
            agents[f"teacher_{number}"] = known.model_copy(update=own)
        env = env.model_copy(update={"teachers": len(teachers), "agents": agents})
    return settings.model_copy(
        update={"env": env, "openai": settings.openai.model_copy(update=openai)}
    )


def _generate(settings: GenerateSettings) -> GroupRun:
    with lean_imports():
        from envserver.cli.console import Console
        from envserver.cli.loop import SignalStop, run_loop
        from envserver.cli.progress import ProgressView, show_result
        from envserver.registry import find
        from envserver.rollouts.scheduler import Share
        from envserver.rollouts.stream import group_requests
        from envserver.running.group_run import GroupRun, Part
        from envserver.running.mix import RunSpec

    name = str(settings.environment)
    spec = RunSpec(settings, name, find(name))
    environment = spec.make_environment()
    part = Part(
        spec=spec,
        environment=environment,
        share=Share(environment.name),
        path=_groups(settings),
        requests=group_requests(environment, repeat=False),
        groups=environment.config.total_steps,
    )
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    run = GroupRun(
        [part],
        settings,
        resume=settings.resume,
        overwrite=settings.overwrite,
        expected=environment.config.total_steps,
        show=partial(ProgressView, console),
        stop=SignalStop(partial(console.print, markup=False)),
    )
    try:
        run_loop(run.run())
    finally:
        if run.tally.rollouts or run.tally.failures:
            show_result(console, run, settings)
    if run.stopped:
        console.print("Stopped early; run the same command with --resume to continue.")
    elif lost := run.tally.drops.total():
        console.print(f"{lost:,} without an answer: the same command with --resume asks again.")
    return run


def _write_plans(settings: RouterGenerateSettings) -> int:
    """Writes rows.jsonl and summary.json; returns the number of rows."""
    from envserver.cli.console import Console

    from ..sft_building.folder import write_summary
    from ..sft_building.prepare import Selection, write_plans

    path = settings.out / "rows.jsonl"
    selection = Selection(settings.rows, settings.balance, settings.balance_seed)
    summary = write_plans(_groups(settings), path, selection)
    write_summary(settings.out / "summary.json", summary)
    console = Console()
    lines = [f"{summary['rows']:,} rows of {summary['groups']:,} queries"]
    lines += [f"  {count:,} times: {reason}" for reason, count in summary["dropped"].items()]
    for name in ("routes", "difficulties", "spent"):
        counts = ", ".join(f"{key} {count:,}" for key, count in summary[name].items())
        lines += [f"{name}: {counts}"] if counts else []
    for text in [*lines, f"In {path}"]:
        console.say(text)
    return int(summary["rows"])


def _groups(settings: GenerateSettings) -> Path:
    return settings.out / "groups.jsonl"
