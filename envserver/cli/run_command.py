"""`envserver run`: runs an environment's agent once and writes the trajectory to a file.

`python -m environments.math run --question "..." -o out.traj.json`. The flags of a question are the
fields of the environment's `Question`. The work is in `running.asking`.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from envserver_records.errors import Failure

from ..export.unified import write_json
from ..registry.interpreters import become, interpreter_of
from ..running.asking import Answered, ask, asking
from ..running.debugging import EnvironmentRaised
from ..telemetry.redaction import printable
from .command_line import read_run_spec
from .console import Console
from .conversation import show_rollout
from .logs import configure_logs
from .loop import run_loop
from .person import Person
from .specs.run_command import COMMAND
from .watching import watch


def run(argv: list[str]) -> int:
    line = read_run_spec(COMMAND, argv)
    settings = line.settings
    console = Console(stderr=True, highlight=False, soft_wrap=True)

    def failed(failure: Failure) -> None:
        console.print(f"Trying again: {failure.message}", markup=False)

    if settings.watch:
        return watch(_once(argv), line, console)
    if settings.debug and (python := interpreter_of(line.reference)) is not None:
        sys.stderr.flush()
        become(python, ["run", *argv])
    configure_logs("warning" if settings.debug else settings.log_level, settings.log_format)
    person = Person(console).answer if settings.interactive else None
    try:
        answered = run_loop(ask(asking(line), failed, person))
    except EnvironmentRaised as raised:
        traceback.print_exception(raised.error)
        return 1
    if settings.verbose:
        show_rollout(console, answered.trajectory)
    path = settings.out or _free_path(line.environment_class.name, answered.task_id)
    write_json(path, answered.document)
    _show(answered, path, console)
    return 0


def _once(argv: list[str]) -> list[str]:
    """Returns the arguments without `--watch`."""
    kept: list[str] = []
    skips_value = False
    for word in argv:
        if skips_value and word.lower() in ("true", "1", "yes"):
            skips_value = False
            continue
        skips_value = word == "--watch"
        if not skips_value and not word.startswith("--watch="):
            kept.append(word)
    return kept


def _show(answered: Answered, path: Path, console: Console) -> None:
    """Prints the answer on stdout and everything else on stderr."""
    answer, trajectory = answered.document["final_answer"], answered.trajectory
    shown = printable(answer or "", keep="\n\t") if sys.stdout.isatty() else answer
    sys.stdout.write(f"{shown}\n" if shown else "")
    sys.stdout.flush()
    if not answer:
        console.print("There is no final answer.", markup=False)
    if trajectory.limit is not None:
        console.print(f"The rollout hit its limit: {trajectory.limit}.", markup=False)
    if trajectory.score.reward is not None:
        console.print(f"Reward: {trajectory.score.reward:g}", markup=False)
    if answered.judge:
        console.print(answered.judge, markup=False)
    console.print(f"Trajectory: {path}", markup=False)


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
