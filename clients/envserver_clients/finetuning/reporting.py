"""Reports a training's progress: a line per step in metrics.jsonl, and a bar on the console.

What always holds: metrics.jsonl has one line for each step, even after a kill.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

from envserver_clients.training.metrics import JsonLines

MEASURED: Final = "heldout_loss"
_LEFT_OUT = ("total_flos", "num_tokens", "train_runtime", "train_samples_per_second")
_SHOWN = ("loss", "mean_token_accuracy", "rewards/accuracies", "eval_loss")


class Reporting(TrainerCallback):  # type: ignore[misc]  # a class of a library without types
    """Writes lines and shows the bar.

    Args:
        path: metrics.jsonl.
        step: step of the checkpoint that the training continues from.
        name: the training's name, shown before the bar.
    """

    def __init__(self, path: Path, step: int, name: str, console: Console) -> None:
        self._lines = JsonLines(path, step)
        self._evaluated = {line["step"] for line in self._lines.kept if "eval_loss" in line}
        self._measured = {line["step"] for line in self._lines.kept if MEASURED in line}
        self._name = name
        self._begun = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
        )
        self._task: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._begun = time.monotonic()
        self._bar.start()
        self._task = self._bar.add_task(
            self._name, total=state.max_steps, completed=state.global_step, note=""
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._bar.update(self._task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        numbers = {name: one for name, one in (logs or {}).items() if name not in _LEFT_OUT}
        if "train_loss" in numbers:
            return  # the summary at the end, which covers this start only
        if "eval_loss" in numbers and state.global_step in self._evaluated:
            return  # killed between this line and the end
        line = {"step": state.global_step, **numbers}
        line["seconds"] = round(time.monotonic() - self._begun, 3)
        self._lines.write(line)
        note = " ".join(f"{name} {numbers[name]:.3f}" for name in _SHOWN if name in numbers)
        if self._task is not None:
            self._bar.update(self._task, note=note)

    def measure(self, step: int, measured: Callable[[], dict[str, float]]) -> None:
        """Writes the measures of held-out rows at a step, unless they are there already."""
        if step not in self._measured:
            self._lines.write({"step": step, **measured()})

    def close(self) -> None:
        """Stops the bar and leaves it visible."""
        self._bar.stop()
        self._lines.close()
