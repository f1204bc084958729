"""What a training says of itself: a line a step in metrics.jsonl, and a bar on the console.

What holds: metrics.jsonl has the lines of the steps that the checkpoint knows, and of those after
it, each once, also after a kill.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

from envserver_clients.training.metrics import JsonLines

_LEFT_OUT = ("total_flos", "num_tokens", "train_runtime", "train_samples_per_second")
_SHOWN = ("loss", "mean_token_accuracy", "rewards/accuracies", "eval_loss")


class Reporting(TrainerCallback):  # type: ignore[misc]  # a class of a library without types
    """Lines and bar.

    Args:
        path: of metrics.jsonl.
        step: of the checkpoint that the training goes on from.
        name: of the training, before the bar.
    """

    def __init__(self, path: Path, step: int, name: str, console: Console) -> None:
        self._lines = JsonLines(path, step)
        self._evaluated = {line["step"] for line in self._lines.kept if "eval_loss" in line}
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
            return  # the last words of a training: of this start only
        if "eval_loss" in numbers and state.global_step in self._evaluated:
            return  # killed between this line and the end
        line = {"step": state.global_step, **numbers}
        line["seconds"] = round(time.monotonic() - self._begun, 3)
        self._lines.write(line)
        note = " ".join(f"{name} {numbers[name]:.3f}" for name in _SHOWN if name in numbers)
        if self._task is not None:
            self._bar.update(self._task, note=note)

    def close(self) -> None:
        """The bar stays as it is."""
        self._bar.stop()
        self._lines.close()
