"""`envserver merge`: reads the settings, shows progress and prints the result."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from envserver_records.errors import ConfigError, UsageError
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from .console import Console
from .loop import Terminated
from .specs.merge_command import ARITHMETIC, COMMAND, MergeSettings


def run(argv: list[str]) -> int:
    """Runs the command; prints the folder of each model, and the vector's file."""
    settings = COMMAND.read(argv)
    console = Console(stderr=True)
    with _ended_by_sigterm():
        try:
            places, notes = _merged(settings, console)
        except KeyboardInterrupt:
            console.print("Stopped: nothing was written.", highlight=False)
            raise
    for note in notes:
        console.say(f"Note: {note}.")
    for place in places:
        print(place)
    return 0


def _merged(settings: MergeSettings, console: Console) -> tuple[list[Path], list[str]]:
    from envserver_factory.merging.checks import Allowed
    from envserver_factory.merging.mergekit import Method, merge_with
    from envserver_factory.merging.recipe import Recipe, Vector, parse_parts

    vectors = parse_parts(settings.add)
    if (settings.rl is None) != (settings.sft is None):
        raise UsageError("--rl and --sft must be given together: rl - sft is added.")
    if settings.rl is not None:
        vectors = (Vector(settings.rl, settings.sft), *vectors)
    recipe = Recipe(settings.base, vectors, tuple(settings.alpha) or (1.0,))
    allowed = Allowed(
        config=settings.allow_config_differences,
        tokenizer=settings.allow_tokenizer_differences,
        missing=settings.allow_missing_tensors,
    )
    if settings.method != ARITHMETIC:
        if settings.out is None or settings.save_vector is not None:
            raise UsageError("A mergekit method needs --out, and makes no --save_vector.")
        method = Method(settings.method, settings.density, settings.parameters)
        notes = merge_with(
            method, recipe, settings.out, allowed=allowed, overwrite=settings.overwrite
        )
        return [settings.out], notes
    if settings.density is not None or settings.parameters:
        raise ConfigError("--density and --parameters need a mergekit method: set --method.")
    return _with_arithmetic(settings, recipe, allowed, console)


def _with_arithmetic(
    settings: MergeSettings, recipe: Any, allowed: Any, console: Console
) -> tuple[list[Path], list[str]]:
    from envserver_factory.merging import merge

    with _bar(console) as bar:
        task = bar.add_task("merging", total=None)
        merged = merge(
            recipe,
            _places(settings),
            vector=settings.save_vector,
            allowed=allowed,
            allow_not_finite=settings.allow_not_finite,
            overwrite=settings.overwrite,
            begin=lambda total: bar.update(task, total=total),
            report=lambda done: bar.advance(task, done),
        )
    return [
        *merged.folders,
        *([settings.save_vector] if settings.save_vector else []),
    ], merged.notes


def _places(settings: MergeSettings) -> list[Path]:
    """Returns the folders to make: one for each alpha; none where only the vector is wanted."""
    if settings.out is None:
        if settings.save_vector is None or settings.alpha:
            raise UsageError("--out DIR is needed.")
        return []
    out = settings.out
    return [out / f"alpha-{alpha!r}" for alpha in settings.alpha] or [out]


def _bar(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM act like Ctrl-C, so that partial output is removed."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
