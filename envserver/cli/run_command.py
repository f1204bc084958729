"""`envserver run`: asks an environment's agent one question and writes the trajectory to a file.

`python -m environments.math run --question "..." -o out.traj.json`. The flags of a question are the
fields of the environment's `Question`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, TypeVar

from envserver_records.errors import ConfigError, Failure
from envserver_records.records import Result, Trajectory
from pydantic import ValidationError
from rich.console import Console

from ..config import EnvironmentConfig, Section
from ..environment import Environment
from ..export.unified import unified, write_json
from ..rollouts.single import run_single
from ..running.context import rollout_context
from ..running.spec import RunSpec
from .command_line import read_run_spec
from .logs import configure_logs
from .loop import run_loop
from .specs.run_command import COMMAND, RunSettings

S = TypeVar("S", bound=Section)


def run(argv: list[str]) -> int:
    """Runs the command.

    Raises:
        EnvserverError: it cannot be run, or the rollout failed for good.
    """
    line = read_run_spec(COMMAND, argv)
    configure_logs(line.settings.log_level, line.settings.log_format)
    asked = _question(line, line.environment_class.Question)
    line = _as_asked(line, asked)
    return run_loop(ask(line, line.make_environment(), asked))


async def ask(line: RunSpec[Any], environment: Environment, asked: Any) -> int:
    """Runs the question and prints the result; returns the exit status.

    Raises:
        RolloutError: it failed through no fault of the model, also on retry.
        InputError: the question is invalid.
    """
    settings: RunSettings = line.settings
    task = environment.task_from_question(asked)
    console = Console(stderr=True)
    async with rollout_context(
        settings,
        environment,
        line.reference,
    ) as parts:

        def failed(failure: Failure) -> None:
            console.print(f"Trying again: {failure.message}", highlight=False, markup=False)

        scored = asked.is_scored()
        trajectory = await run_single(parts, task, scored=scored, failed=failed)
        ended_at, model = time.time(), parts.model
    result = Result(output=trajectory.output, messages=trajectory.messages)
    document = unified(
        trajectory,
        ended_at=ended_at,
        question=asked.question,
        final_answer=environment.final_answer(result),
        model=model,
        seed=environment.config.seed,
        source="envserver run",
        tokens=settings.include_tokens,
    )
    path = settings.out or _free_path(environment.name, task.id)
    write_json(path, document)
    _show(document["final_answer"], trajectory, path)
    return 0


def _show(answer: str, trajectory: Trajectory, path: Path) -> None:
    """Prints the answer on stdout and everything else on stderr."""
    sys.stdout.write(f"{answer}\n" if answer else "")
    sys.stdout.flush()
    beside = Console(stderr=True, highlight=False, soft_wrap=True)
    if not answer:
        beside.print("There is no final answer.", markup=False)
    if trajectory.limit is not None:
        beside.print(f"The rollout hit its limit: {trajectory.limit}.", markup=False)
    if trajectory.score.reward is not None:
        beside.print(f"Reward: {trajectory.score.reward:g}", markup=False)
    beside.print(f"Trajectory: {path}", markup=False)


def _question(line: RunSpec[Any], asked: type[Environment.Question]) -> Environment.Question:
    """
    Raises:
        ConfigError: the settings do not form a valid question.
    """
    given = {name: getattr(line.settings, name) for name in asked.model_fields}
    return _validated(asked, given, "--")


def _as_asked(line: RunSpec[Any], asked: Environment.Question) -> RunSpec[Any]:
    """Returns `line` with the environment settings that the question implies."""
    implied = asked.settings()
    if not implied:
        return line
    config: EnvironmentConfig = line.settings.env
    said = config.model_dump(exclude_unset=True) | implied
    settings = line.settings.model_copy(update={"env": _validated(type(config), said, "--env.")})
    return RunSpec(settings, line.reference, line.environment_class)


def _validated(kind: type[S], values: dict[str, Any], prefix: str) -> S:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        lines = [
            f"{prefix}{'.'.join(map(str, one['loc']))}: {one['msg']}."
            for one in error.errors(include_url=False, include_context=False, include_input=False)
        ]
        raise ConfigError("\n".join(lines), problems=lines) from None


def _free_path(environment: str, task_id: str) -> Path:
    """Returns a file name that does not exist yet."""
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in task_id)[:80]
    stem = f"{environment}_{name.removeprefix(f'{environment}-')}"
    folder = Path("runs")
    path, number = folder / f"{stem}.traj.json", 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}.traj.json"
    return path
