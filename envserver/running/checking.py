"""The work of `envserver check`: tasks, known results, and plays through the rollout.

In: an environment with its settings. Out: an EnvironmentReport.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

from envserver_records.errors import EnvserverError
from envserver_records.records import Task

from ..config import RolloutsConfig, Settings
from ..environment import Environment
from ..judges.server import JudgeServer
from ..registry import absolute
from ..rollouts.check_report import EnvironmentReport, ScoringCost
from ..rollouts.checking import Plays, check
from ..rollouts.scoring import ScorerPool
from ..sandbox.watched import WatchedSandboxes
from .check_plays import play
from .check_settings import CheckSettings
from .judging import judge_of, scorer_processes
from .sandboxes import sandboxes_of
from .spec import RunSpec

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

        def fresh() -> Environment:
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
                play=lambda tasks: _play(spec, fresh(), tasks, judge, progress),
                progress=lambda done, of: progress("results", done, of),
            )
    report.scoring = _cost(costs, spec.environment_class.score_cpu_seconds)
    return report


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
