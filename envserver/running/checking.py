"""The work of `envserver check`: tasks, known results, and plays through the rollout.

In: an environment with its settings. Out: an EnvironmentReport.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from envserver_records.errors import ConfigError, EnvserverError
from envserver_records.records import Task

from ..config import RolloutsConfig, Settings
from ..environment import Environment
from ..judges.server import JudgeServer
from ..models.model_files import find_tokenizer
from ..registry import absolute
from ..rollouts.check_data import Placed, estimated_tokens
from ..rollouts.check_report import EnvironmentReport, ScoringCost
from ..rollouts.checking import Plays, RowsToCheck, check, placed, watched_rows
from ..rollouts.scoring import ScorerPool
from ..rollouts.task_digests import first_tasks
from ..rows.environment import RowsEnvironment
from ..rows.sources import Source
from ..sandbox.watched import WatchedSandboxes
from ..tokens.vocabulary import Vocabulary
from .check_plays import play
from .judging import judge_of, scorer_processes
from .run_settings import CheckSettings
from .sandboxes import sandboxes_of
from .spec import RunSpec

MOST_ROWS = 100_000
OnProgress = Callable[[str, int, int], None]
"""Is called with what is done ("results", "plays"), how many are done, and of how many."""


async def check_environment(
    spec: RunSpec[CheckSettings], progress: OnProgress
) -> EnvironmentReport:
    """Checks an environment.

    Raises:
        ConfigError: it cannot be loaded, has no tasks, or needs a sandbox and no backend works.
    """
    settings = spec.settings
    costs: list[tuple[float, float]] = []
    async with (
        sandboxes_of(spec.make_environment(), settings.sandbox) as service,
        judge_of(settings.judge, Path("data")) as judge,
    ):
        address = service.address if service is not None else None

        def fresh(spec: RunSpec[CheckSettings] = spec) -> Environment:
            environment = spec.make_environment()
            if address is not None:
                environment.sandboxes = WatchedSandboxes(address)
            return environment

        async with ScorerPool(
            absolute(spec.reference),
            settings.env.model_dump(mode="json"),
            scorer_processes(settings.processes, settings.judge),
            sandbox_address=address,
            judge=judge,
            spent=lambda seconds, cpu_seconds: costs.append((seconds, cpu_seconds)),
        ) as scorer:
            report = await check(
                fresh,
                scorer,
                most_tasks=settings.tasks,
                rows=await asyncio.to_thread(_rows_to_check, spec, fresh),
                play=lambda tasks: _play(spec, fresh(), tasks, judge, progress),
                progress=lambda done, of: progress("results", done, of),
            )
    report.scoring = _cost(costs, spec.environment_class.score_cpu_seconds)
    return report


def _rows_to_check(
    spec: RunSpec[CheckSettings], make: Callable[[RunSpec[CheckSettings]], Environment]
) -> RowsToCheck:
    """Reads what the settings say about rows: how many, an evaluation set, a tokenizer."""
    settings, env = spec.settings, spec.settings.env
    is_rows = issubclass(spec.environment_class, RowsEnvironment)
    most = settings.rows
    if most is None:
        most = MOST_ROWS if is_rows or getattr(env, "data_path", None) else 0
    limits = {"env.max_token_length": env.max_token_length}
    if settings.context_tokens is not None:
        limits["context_tokens"] = settings.context_tokens
    name = settings.tokenizer
    return RowsToCheck(
        most,
        evaluation=_evaluation_set(spec, make) if settings.evaluation_set else (),
        tokens=_token_counter(name) if name else estimated_tokens,
        tokenizer=name,
        limits=limits,
    )


def _token_counter(tokenizer: str) -> Callable[[str], int]:
    vocabulary = Vocabulary.load(find_tokenizer(tokenizer))
    return lambda text: len(vocabulary.encode(text.encode("utf-8", "replace").decode()))


def _evaluation_set(
    spec: RunSpec[CheckSettings], make: Callable[[RunSpec[CheckSettings]], Environment]
) -> list[Placed]:
    settings, held_out = spec.settings, spec.settings.evaluation_set
    changed: dict[str, Any] = {"split": settings.evaluation_split}
    if not issubclass(spec.environment_class, RowsEnvironment):
        if "data_path" not in spec.environment_class.Config.model_fields:
            raise ConfigError(
                f"{spec.environment_class.name!r} reads no evaluation set: it has no data_path.",
                hint="Leave out --evaluation_set.",
            )
        changed["data_path"] = Path(held_out)
    held_out_settings = settings.model_copy(update={"env": settings.env.model_copy(update=changed)})
    environment = make(dataclasses.replace(spec, settings=held_out_settings))
    if isinstance(environment, RowsEnvironment):
        environment.source = Source(held_out)  # type: ignore[misc]
    _, origins = watched_rows(environment)
    return placed(first_tasks(environment, MOST_ROWS), origins)


async def _play(
    spec: RunSpec[CheckSettings],
    environment: Environment,
    tasks: list[Task],
    judge: JudgeServer | None,
    progress: OnProgress,
) -> Plays:
    """Plays the tasks; that rollouts cannot be run at all is a problem of the environment."""
    checked = spec.settings
    if not checked.plays:
        return Plays()
    settings = Settings(
        sandbox=checked.sandbox,
        workers=checked.workers,
        judge=checked.judge,
        rollouts=RolloutsConfig(scorer_processes=checked.processes),
    ).model_copy(update={"env": checked.env, "environment": checked.environment})
    try:
        return await play(
            settings,
            environment,
            spec.reference,
            tasks,
            most_wrong=checked.plays,
            judge=judge,
            progress=lambda done, of: progress("plays", done, of),
        )
    except EnvserverError as error:
        return Plays(problems=[f"Its rollouts cannot be run: {error}"])


def _cost(costs: list[tuple[float, float]], limit: float) -> ScoringCost | None:
    if not costs:
        return None
    seconds, cpu_seconds = zip(*costs, strict=True)
    return ScoringCost(
        count=len(costs),
        seconds=median(seconds),
        cpu_seconds=median(cpu_seconds),
        most_seconds=max(seconds),
        most_cpu_seconds=max(cpu_seconds),
        limit_cpu_seconds=limit,
    )
