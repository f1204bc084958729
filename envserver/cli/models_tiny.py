"""`envserver models tiny DIR`: makes the model and shows the progress; the work is in
`envserver_local.tiny.from_experts`."""

from __future__ import annotations

from pathlib import Path

from envserver_local.tiny.from_experts import (
    RECIPES,
    TinyPlan,
    check_folder,
    make_from_experts,
)
from envserver_records.errors import UsageError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .console import Console
from .loop import run_loop
from .specs.models_tiny import COMMAND


def run(argv: list[str]) -> int:
    """Runs the command; prints the model's folder.

    Args:
        argv: the arguments after `models tiny`.
    """
    settings = COMMAND.read(argv)
    if settings.folder == Path():
        raise UsageError("Give a folder: envserver models tiny FOLDER")
    check_folder(settings.folder, overwrite=settings.overwrite)
    recipe = RECIPES[settings.tasks]
    plan = TinyPlan(
        tasks=settings.tasks,
        seed=settings.seed,
        steps=settings.steps or recipe.steps,
        groups=settings.groups or recipe.groups,
        solve_probability=settings.solve_probability or recipe.solve_probability,
        threads=settings.threads,
    )
    with _bars() as bars:
        view = _View(bars, plan)
        run_loop(make_from_experts(settings.folder, plan, view, overwrite=settings.overwrite))
    print(settings.folder)
    return 0


class _View:
    """Shows a bar for each kind of experts and one for the training."""

    def __init__(self, bars: Progress, plan: TinyPlan) -> None:
        self._bars = bars
        self._experts = {
            mode: bars.add_task(f"experts, {mode}", total=plan.groups, visible=False, note="")
            for mode in RECIPES[plan.tasks].flags
        }
        self._training = bars.add_task("training", total=plan.steps, visible=False, note="")

    def experts(self, mode: str, groups: int) -> None:
        self._bars.update(self._experts[mode], completed=groups, visible=True)

    def training(self, step: int, loss: float | None) -> None:
        note = "loading torch" if loss is None else f"loss {loss:.3f}"
        self._bars.update(self._training, completed=step, visible=True, note=note)


def _bars() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
    )
