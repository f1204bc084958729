"""Runs a command again whenever a file of the environment changes (`run --watch`).

In: the command's arguments, and the environment with its settings. The command runs as a process of
its own at this terminal, so everything is imported anew.
"""

from __future__ import annotations

import inspect
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..registry.hosted import HostedEnvironment
from ..running.mix import RunSpec
from ..running.run_settings import RunSettings
from .console import Console

_POLL_SECONDS = 0.3
_END_SECONDS = 3.0
"""Seconds in which the command may end by itself; one that stands in a debugger does not."""
_SUFFIXES = {".py", ".md", ".txt", ".jinja", ".json", ".jsonl", ".yaml", ".yml", ".toml", ".csv"}
_MOST_FILES = 1000

Times = dict[Path, int]


def watch(argv: Sequence[str], spec: RunSpec[RunSettings], console: Console) -> int:
    """Runs `envserver run` with `argv` now and after each change, until Ctrl-C; returns 130."""
    try:
        while True:
            seen = modified(spec)
            process = subprocess.Popen([sys.executable, "-m", "envserver", "run", *argv])
            try:
                changed = _next_change(spec, seen, process, console)
            finally:
                _end(process)
            console.print(f"{changed.name} has changed: running again.", markup=False)
    except KeyboardInterrupt:
        return 130


def modified(spec: RunSpec[RunSettings]) -> Times:
    """Returns the files of an environment with the times of their last change, in nanoseconds.

    They are its own file, what lies beside it if it is part of a package, and the files that its
    reference and its settings name.
    """
    kind = spec.environment_class
    file = kind.file if issubclass(kind, HostedEnvironment) else inspect.getfile(kind)
    own = Path(file).resolve()
    files = [own, *_named(spec.reference), *_named(spec.settings.env.model_dump())]
    if (own.parent / "__init__.py").exists():
        beside = (path for path in own.parent.rglob("*") if path.suffix in _SUFFIXES)
        files += itertools.islice(beside, _MOST_FILES)
    times = {}
    for path in files:
        try:
            times[path] = path.stat().st_mtime_ns
        except FileNotFoundError:  # an editor is replacing it
            times[path] = 0
    return times


def _named(value: Any) -> Iterator[Path]:
    """Yields the files that settings name, `file.py:function` included."""
    if isinstance(value, str | Path):
        path = Path(str(value).partition(":")[0])
        if path.suffix in _SUFFIXES and path.is_file():
            yield path.resolve()
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _named(inner)


def _next_change(
    spec: RunSpec[RunSettings],
    seen: Times,
    process: subprocess.Popen[bytes],
    console: Console,
) -> Path:
    """Waits until a file is added, changed or removed; returns it."""
    told = False
    while True:
        now = modified(spec)
        if now != seen:
            return next(path for path in {**seen, **now} if seen.get(path) != now.get(path))
        if not told and process.poll() is not None:
            told = True
            console.print("Waiting for a change; Ctrl-C ends.", markup=False)
        time.sleep(_POLL_SECONDS)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
