"""`envserver models tiny DIR`: expert trajectories by `process`, then a supervised start.

`envserver_local.tiny` defines the model; torch is imported only for training.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from envserver_records.errors import ConfigError, ConflictError, EnvserverError, UsageError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .loop import run_loop
from .specs.models_tiny import COMMAND, TinySettings

FACTS = "make_tiny.json"
"""File in the model's folder with the settings that made it."""
GROUP_SIZE = 8
_LAST_WORDS = 2000
_MODES = ("single", "tools")
_SECONDS_BETWEEN_LOOKS = 0.5


def run(argv: list[str]) -> int:
    """Runs the command; prints the model's folder.

    Args:
        argv: the arguments after `models tiny`.

    Raises:
        ConfigError: a setting is wrong, or torch and transformers are missing.
        ConflictError: the folder already exists.
        EnvserverError: the experts failed.
    """
    settings = COMMAND.read(argv)
    _check(settings)
    run_loop(make_tiny(settings, Console(stderr=True)))
    print(settings.folder)
    return 0


async def make_tiny(settings: TinySettings, console: Console) -> None:
    """Makes the model; its folder appears only when it is complete.

    Raises:
        EnvserverError: the experts failed.
    """
    settings.folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=".tiny-", dir=settings.folder.parent) as place,
        Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
        ) as bars,
    ):
        experts = [await _experts(mode, Path(place), settings, bars) for mode in _MODES]
        made = Path(place) / "model"
        await _trained(experts, made, settings, bars)
        if settings.overwrite and settings.folder.exists():
            shutil.rmtree(settings.folder)
        made.rename(settings.folder)


def _check(settings: TinySettings) -> None:
    if settings.folder == Path():
        raise UsageError("Give a folder: envserver models tiny FOLDER")
    missing = [name for name in ("torch", "transformers") if not importlib.util.find_spec(name)]
    if missing:
        raise ConfigError(
            f"Training needs {' and '.join(missing)}, which this Python does not have.",
            hint="pip install 'envserver[local]'",
        )
    folder = settings.folder
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    ours = (folder / FACTS).is_file()
    if not (settings.overwrite and ours):
        hint = "Use --overwrite to replace it." if ours else "Not a tiny model: use another folder."
        raise ConflictError(f"{folder} already exists.", hint=hint)


async def _experts(mode: str, folder: Path, settings: TinySettings, bars: Progress) -> Path:
    """Returns the JSONL file of a separate `process` run in which the simulated engine plays the
    expert.

    Raises:
        EnvserverError: it failed; the message has the end of its output.
    """
    output, log = folder / f"{mode}.jsonl", folder / f"{mode}.log"
    bar = bars.add_task(f"experts, {mode}", total=settings.groups, note="")
    with log.open("wb") as words:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "envserver", "process", "--env", "math"),
            *("--env.data_set", "arithmetic", "--env.mode", mode, "--env.system_prompt", ""),
            *("--env.group_size", str(GROUP_SIZE), "--env.total_steps", str(settings.groups)),
            *("--env.data_path_to_save_groups", str(output)),
            *("--model", "sim", "--sim.openers", "false", "--sim.latency_seconds", "0"),
            *("--sim.solve_probability", str(settings.solve_probability)),
            *("--sim.seed", str(settings.seed), "--log_level", "warning"),
            stdout=words,
            stderr=words,
        )
    try:
        while process.returncode is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _SECONDS_BETWEEN_LOOKS)
            if output.exists():
                bars.update(bar, completed=output.read_bytes().count(b"\n"))
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if process.returncode != 0:
        raise EnvserverError(
            f"The experts' `envserver process` ended with status {process.returncode}:\n"
            + log.read_text(errors="replace")[-_LAST_WORDS:].strip()
        )
    return output


class _GivenUp(Exception):
    """Raised when the training has been cancelled."""


async def _trained(
    experts: list[Path], folder: Path, settings: TinySettings, bars: Progress
) -> None:
    bar = bars.add_task("training", total=settings.steps, note="loading torch")
    given_up = threading.Event()

    def report(step: int, loss: float) -> None:
        if given_up.is_set():
            raise _GivenUp
        bars.update(bar, completed=step, note=f"loss {loss:.3f}")

    training = asyncio.ensure_future(asyncio.to_thread(_train, experts, folder, settings, report))
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
    settings: TinySettings,
    report: Callable[[int, float], None],
) -> None:
    from envserver_local.tiny.making import make

    make(
        experts,
        folder,
        seed=settings.seed,
        steps=settings.steps,
        threads=settings.threads,
        report=report,
    )
    facts = settings.model_dump(mode="json", exclude={"folder", "overwrite"})
    (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
