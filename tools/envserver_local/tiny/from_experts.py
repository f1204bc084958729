"""Makes the model from nothing: expert trajectories by `envserver process`, then the training.

The folder appears only when the model is complete. However it ends, no process and no training
thread is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from envserver_records.errors import ConfigError, ConflictError, EnvserverError
from envserver_records.extras import install_command
from envserver_records.files import replace_folder

FACTS = "make_tiny.json"
"""File in the model's folder with the settings that made it."""
_LAST_CHARACTERS = 2000
_SECONDS_BETWEEN_LOOKS = 0.5


Tasks = Literal["sums", "many", "half_sort", "half_tool"]


@dataclass(frozen=True)
class Recipe:
    """What a model is taught, and how long.

    `flags`: settings of the experts' environment by its mode; each has experts of its own.
    `group_size`: rollouts of the expert per task. The others: see TinyPlan.
    """

    flags: Mapping[str, Sequence[str]]
    group_size: int
    steps: int
    groups: int
    solve_probability: float


_SUMS = ("--env.data_set", "arithmetic")
_LARGE = (*_SUMS, "--env.max_operand", "99")
_SORTING = ("--env.data_set", "sorting")
RECIPES: Mapping[Tasks, Recipe] = {
    "sums": Recipe({"single": _SUMS, "tools": _SUMS}, 8, 500, 124, 0.25),
    "many": Recipe({"single": _SORTING, "tools": _LARGE}, 2, 600, 1500, 0.35),
    "half_sort": Recipe({"single": _SORTING}, 1, 38, 1500, 1.0),
    "half_tool": Recipe({"single": _SORTING, "tools": _LARGE}, 1, 190, 1500, 1.0),
}


@dataclass(frozen=True)
class TinyPlan:
    """How to make the model.

    Args:
        tasks: sums: up to 9, 155 problems; many: sorting five digits with one answer, sums up to 99
            with a calculator, tens of thousands of problems; half_sort and half_tool: one of these,
            from right answers only, and so few steps that most of its answers are wrong.
        seed: for the experts, the initial weights and the training order.
        groups: groups of expert rollouts for each mode.
        solve_probability: fraction of rollouts that the expert solves.
    """

    tasks: Tasks
    seed: int
    steps: int
    groups: int
    solve_probability: float
    threads: int


class TinyView(Protocol):
    def experts(self, mode: str, groups: int) -> None:
        """Called with the number of groups that the experts of `mode` have finished."""

    def training(self, step: int, loss: float | None) -> None:
        """Called after each optimizer step, in the training thread; first with step 0, no loss."""


def check_folder(folder: Path, *, overwrite: bool) -> None:
    missing = [name for name in ("torch", "transformers") if not importlib.util.find_spec(name)]
    if missing:
        raise ConfigError(
            f"Training needs {' and '.join(missing)}, which this Python does not have.",
            hint=install_command("local"),
        )
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    ours = (folder / FACTS).is_file()
    if not (overwrite and ours):
        hint = "Use --overwrite to replace it." if ours else "Not a tiny model: use another folder."
        raise ConflictError(f"{folder} already exists.", hint=hint)


async def make_from_experts(
    folder: Path, plan: TinyPlan, view: TinyView, *, overwrite: bool
) -> None:
    """Makes the model in `folder`; call `check_folder` first."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tiny-", dir=folder.parent) as place:
        experts = [
            await _experts(mode, Path(place), plan, view) for mode in RECIPES[plan.tasks].flags
        ]
        made = Path(place) / "model"
        await _trained(experts, made, plan, view)
        check_folder(folder, overwrite=overwrite)  # the experts took their time
        await asyncio.to_thread(replace_folder, made, folder, Path(place) / "old")


async def _experts(mode: str, folder: Path, plan: TinyPlan, view: TinyView) -> Path:
    """The JSONL file of a `process` run in which the simulated engine plays the expert."""
    output, log = folder / f"{mode}.jsonl", folder / f"{mode}.log"
    recipe = RECIPES[plan.tasks]
    view.experts(mode, 0)
    with log.open("wb") as words:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "envserver", "process", "--env", "math"),
            *recipe.flags[mode],
            *("--env.mode", mode, "--env.system_prompt", ""),
            *("--env.group_size", str(recipe.group_size)),
            *("--env.total_steps", str(plan.groups)),
            *("--env.ensure_scores_are_not_same", "false"),
            *("--env.data_path_to_save_groups", str(output)),
            *("--model", "sim", "--sim.openers", "false", "--sim.latency_seconds", "0"),
            *("--sim.solve_probability", str(plan.solve_probability)),
            *("--sim.seed", str(plan.seed), "--log_level", "warning"),
            stdout=words,
            stderr=words,
        )
    try:
        while process.returncode is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _SECONDS_BETWEEN_LOOKS)
            if output.exists():
                view.experts(mode, output.read_bytes().count(b"\n"))
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if process.returncode != 0:
        raise EnvserverError(
            f"The experts' `envserver process` ended with status {process.returncode}:\n"
            + log.read_text(errors="replace")[-_LAST_CHARACTERS:].strip()
        )
    return output


class _GivenUp(Exception): ...


async def _trained(experts: list[Path], folder: Path, plan: TinyPlan, view: TinyView) -> None:
    view.training(0, None)
    given_up = threading.Event()

    def report(step: int, loss: float) -> None:
        if given_up.is_set():
            raise _GivenUp
        view.training(step, loss)

    training = asyncio.ensure_future(asyncio.to_thread(_train, experts, folder, plan, report))
    try:
        await asyncio.shield(training)
    finally:
        # What was cancelled ends with its step, before its folder is removed.
        given_up.set()
        with contextlib.suppress(_GivenUp):
            await training


def _train(
    experts: list[Path],
    folder: Path,
    plan: TinyPlan,
    report: Callable[[int, float], None],
) -> None:
    from .training import make  # imports torch

    make(
        experts,
        folder,
        seed=plan.seed,
        steps=plan.steps,
        threads=plan.threads,
        report=report,
    )
    (folder / FACTS).write_text(json.dumps(dataclasses.asdict(plan), indent=1) + "\n")
