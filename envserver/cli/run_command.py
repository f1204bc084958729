"""`envserver run`: asks an environment's agent one question and writes the trajectory to a file.

`python -m environments.math run --question "..." -o out.traj.json`. The flags of a question are the
fields of the environment's `Question`. The work is in `running.asking`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from envserver_records.errors import Failure

from ..export.unified import write_json
from ..running.asking import Answered, ask, asking
from ..telemetry.printable import printable
from .command_line import read_run_spec
from .console import Console
from .logs import configure_logs
from .loop import run_loop
from .specs.run_command import COMMAND


def run(argv: list[str]) -> int:
    """Runs the command.

    Raises:
        EnvserverError: it cannot be run, or the rollout failed for good.
    """
    line = read_run_spec(COMMAND, argv)
    configure_logs(line.settings.log_level, line.settings.log_format)
    console = Console(stderr=True, highlight=False, soft_wrap=True)

    def failed(failure: Failure) -> None:
        console.print(f"Trying again: {failure.message}", markup=False)

    answered = run_loop(ask(asking(line), failed))
    path = line.settings.out or _free_path(line.environment_class.name, answered.task_id)
    write_json(path, answered.document)
    _show(answered, path, console)
    return 0


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
