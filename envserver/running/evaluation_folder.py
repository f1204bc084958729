"""Writes the folder of an evaluation: its run file, tasks and report; merges those of shards.
A folder belongs to one run and its settings; its report is what `read_folder` makes of its files.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from envserver_records.errors import ConfigError, ConflictError, InputError
from envserver_records.files import replace_file, replacing, storing

from ..evaluation.folders import (
    RUN_FILE,
    Evaluated,
    RunFile,
    View,
    groups_path,
    read_folder,
    read_run_file,
    tasks_path,
    whole,
)
from ..evaluation.page import report_page
from ..evaluation.report import Report, Suite
from ..evaluation.results import TaskFacts, read_facts, read_tasks
from ..evaluation.tables import csv_of, markdown_of
from ..export.unified import write_json

_NAMES = ("env", "sampling", "agent")


def claim(folder: Path, wanted: RunFile, *, resume: bool, overwrite: bool) -> None:
    """Checks that `folder` is new or belongs to the same run, and writes the run file."""
    before = None if overwrite else read_run_file(folder)
    if before is not None:
        if not resume:
            raise ConfigError(
                f"{folder} holds an evaluation.",
                hint="Continue it with --resume, or replace it with --overwrite.",
            )
        _check_same(folder, before, wanted)
        wanted.parts = list(dict.fromkeys([*before.parts, *wanted.parts]))
    write_run_file(folder, wanted)


def _check_same(folder: Path, before: RunFile, wanted: RunFile) -> None:
    if before == RunFile():
        path = folder / RUN_FILE
        raise InputError(f"{path} cannot be read: it names no evaluation.", place=str(path))
    old, new = before.evaluated, wanted.evaluated
    if old is None and new is None:
        return
    if old is None or new is None:
        raise ConfigError(
            f"{folder} is for {'several environments' if old is None else old.environment}.",
            hint="Resume with the settings it was started with, or name another folder.",
        )
    differing = [] if old.environment == new.environment else [f"env {old.environment}"]
    if old.shard != new.shard:
        differing.append(f"shard {old.shard or 'of all'}")
    if old.variants != new.variants:
        differing.append(f"--perturb {','.join(old.variants) or 'unset'} and its paraphrases")
    for section in _NAMES:
        ours, theirs = getattr(new, section), getattr(old, section)
        differing += [
            f"{name} {theirs.get(name)} (now {value})"
            for name, value in ours.items()
            if theirs.get(name) != value
        ]
    if differing:
        raise ConfigError(
            f"{folder} was written by a run with {', '.join(differing)}.",
            hint="Resume with the settings of that run, or name another folder.",
        )


def write_run_file(folder: Path, run: RunFile) -> None:
    write_json(folder / RUN_FILE, msgspec.to_builtins(run))


def write_tasks(path: Path, tasks: Iterable[TaskFacts]) -> None:
    write_text(path, "".join(f"{msgspec.json.encode(task).decode()}\n" for task in tasks))


def write_report(folder: Path, view: View) -> Report | Suite:
    reports = read_folder(folder, view)
    run = read_run_file(folder)
    for name in run.parts if run is not None else ():
        _write(folder / name, read_folder(folder / name, view))
    return _write(folder, reports)


def _write(folder: Path, reports: Sequence[Report]) -> Report | Suite:
    report = whole(reports)
    write_json(folder / "report.json", msgspec.to_builtins(report, str_keys=True))
    write_text(folder / "report.md", markdown_of(report))
    write_text(folder / "report.html", report_page(report))
    write_text(folder / "attempts.csv", csv_of(reports))
    return report


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically."""
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text, sync=False)


T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """Shard `number` (from 1) of `count`. Together they have all tasks of a stream, each once, with
    the group ids of a whole run."""

    number: int = 1
    count: int = 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}" if self.count > 1 else ""

    def taken(self, stream: Iterable[T]) -> Iterator[T]:
        return itertools.islice(stream, self.number - 1, None, self.count)

    def size(self, total: int | None) -> int | None:
        return None if total is None else len(range(self.number - 1, total, self.count))


def shard_of(text: str) -> Shard:
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    shard = Shard(int(found[1]), int(found[2])) if found else Shard()
    if (text and not found) or not 1 <= shard.number <= shard.count:
        raise ConfigError(f"--shard {text!r} is not a shard, such as 1/4 or 4/4.")
    return shard


_OWN = ("complete", "finished_at", "shard", "env")
"""Facts of a shard that need not be equal, or are compared one by one."""


@dataclass(frozen=True)
class Accepted:
    """Differences between shards that are accepted.
    `slices`: settings in which they may differ. `partial`: some may be missing or unfinished; the
    report says that it is not complete."""

    slices: Sequence[str] = ()
    partial: bool = False


@dataclass(frozen=True)
class _Shard:
    folder: Path
    run: RunFile
    evaluated: Evaluated
    tasks: Mapping[str, Sequence[TaskFacts]]
    """By baseline; "": the model's own run."""

    @property
    def of(self) -> Shard:
        return shard_of(self.evaluated.shard)


def merge_evaluations(
    folders: Sequence[Path], out: Path, accepted: Accepted, *, overwrite: bool = False
) -> Report | Suite:
    if len(folders) < 2:
        raise ConfigError("At least two shards are merged: evaluate merge SHARD SHARD --out DIR.")
    if out.resolve() in [folder.resolve() for folder in folders]:
        raise ConfigError(f"{out} is one of the shards: name another folder.")
    if not overwrite and read_run_file(out) is not None:
        raise ConflictError(f"{out} holds an evaluation.", hint="Replace it with --overwrite.")
    names = _parts_of(folders)
    parts = {name: _checked([folder / name for folder in folders], accepted) for name in names}
    for name, shards in parts.items():
        _write_merged(out / name, shards)
    if names != [""]:
        write_run_file(out, RunFile(parts=names))
    return write_report(out, View())


def _parts_of(folders: Sequence[Path]) -> list[str]:
    runs = [_read_run(folder) for folder in folders]
    for folder, run in zip(folders, runs, strict=True):
        if run.parts != runs[0].parts:
            raise _unlike(folder, "has the environments", run.parts, folders[0], runs[0].parts)
    return runs[0].parts or [""]


def _read_run(folder: Path) -> RunFile:
    run = read_run_file(folder)
    if run is None or (run.evaluated is None and not run.parts):
        raise InputError(
            f"{folder} holds no shard of an evaluation.",
            hint="`envserver evaluate --shard 1/4 --out DIR` makes one; lm-eval's are not merged.",
            place=str(folder),
        )
    return run


def _checked(folders: Sequence[Path], accepted: Accepted) -> list[_Shard]:
    shards = [_read_shard(folder) for folder in folders]
    for shard in shards[1:]:
        _check_settings(shards[0], shard, accepted.slices)
    _check_models(shards)
    for name in ("", *shards[0].evaluated.baselines):
        _check_tasks(shards, name)
    lacking = _lacking(shards)
    if lacking and not accepted.partial:
        hint = "--partial merges them; the report then says that it is incomplete."
        raise InputError(lacking, hint=hint)
    return shards


def _read_shard(folder: Path) -> _Shard:
    run = _read_run(folder)
    if run.evaluated is None:
        raise InputError(f"{folder / RUN_FILE} names no environment.", place=str(folder))
    names = [name for name in ("", *run.evaluated.baselines) if tasks_path(folder, name).exists()]
    tasks = {name: read_tasks(tasks_path(folder, name)) for name in names}
    return _Shard(folder, run, run.evaluated, tasks)


def _check_settings(first: _Shard, shard: _Shard, slices: Sequence[str]) -> None:
    ours, theirs = (_settings_of(shard_of) for shard_of in (first, shard))
    for name in ours | theirs:
        if ours.get(name) != theirs.get(name) and name.removeprefix("env.") not in slices:
            raise _unlike(shard.folder, name, theirs.get(name), first.folder, ours.get(name))


def _settings_of(shard: _Shard) -> dict[str, Any]:
    facts = msgspec.to_builtins(shard.evaluated)
    found = {name: value for name, value in facts.items() if name not in _OWN}
    found |= {f"env.{name}": value for name, value in shard.evaluated.env.items()}
    return found | {"counted": msgspec.to_builtins(shard.run.counted), "shards": shard.of.count}


def _check_models(shards: Sequence[_Shard]) -> None:
    models = {shard.folder: _model_of(shard.folder) for shard in shards}
    known = {folder: model for folder, model in models.items() if model}
    for folder, model in known.items():
        first = next(iter(known))
        if model != known[first]:
            raise _unlike(folder, "model", model, first, known[first])


def _model_of(folder: Path) -> str:
    path = groups_path(folder)
    first = next(read_facts(path), None) if path.exists() else None
    return first.model if first is not None else ""


def _check_tasks(shards: Sequence[_Shard], name: str) -> None:
    seen: dict[str, tuple[Path, int]] = {}
    for shard in shards:
        path = tasks_path(shard.folder, name)
        for line, task in enumerate(shard.tasks.get(name, ()), 1):
            before, number = seen.setdefault(task.task_id, (path, line))
            if before != path:
                raise InputError(
                    f"{path}, line {line}: task {task.task_id!r} is in another shard, too "
                    f"({before}, line {number}).",
                    hint="Shards have different tasks: evaluate --shard 1/4, --shard 2/4, ...",
                    place=f"line {line}",
                )


def _lacking(shards: Sequence[_Shard]) -> str:
    for shard in shards:
        if not shard.evaluated.complete:
            return f"{shard.folder} is not finished."
    count = shards[0].of.count
    if count == 1:
        return ""
    missing = set(range(1, count + 1)) - {shard.of.number for shard in shards}
    if missing:
        return f"Shard {', '.join(f'{number}/{count}' for number in sorted(missing))} is missing."
    total = sum(len(shard.tasks.get("", ())) for shard in shards)
    for shard in shards:
        path, has = tasks_path(shard.folder), len(shard.tasks.get("", ()))
        if has != (size := shard.of.size(total)):
            return (
                f"{path} has {has} of {total} tasks; shard {shard.of} has {size}. Did all shards "
                "have the same --env.total_steps?"
            )
    return ""


def _write_merged(out: Path, shards: Sequence[_Shard]) -> None:
    first = shards[0]
    for name in ("", *first.evaluated.baselines):
        with storing(out):
            out.mkdir(parents=True, exist_ok=True)
            with replacing(groups_path(out, name)) as file:
                for shard in shards:
                    file.writelines(_lines(groups_path(shard.folder, name)))
        tasks = [task for shard in shards for task in shard.tasks.get(name, ())]
        if first.of.count > 1:  # the order of the stream, which numbers its groups
            tasks.sort(key=lambda task: task.group_id)
        write_tasks(tasks_path(out, name), tasks)
    evaluated = msgspec.structs.replace(
        first.evaluated,
        env=_settings_together([shard.evaluated.env for shard in shards]),
        shard="",
        complete=not _lacking(shards),
        finished_at=max(shard.evaluated.finished_at for shard in shards),
    )
    run = RunFile(name=first.run.name, evaluated=evaluated, counted=first.run.counted)
    write_run_file(out, run)


def _lines(path: Path) -> Iterator[bytes]:
    """Yields only complete lines; a missing file has none."""
    if path.exists():
        with path.open("rb") as lines:
            yield from (line for line in lines if line.endswith(b"\n"))


def _settings_together(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the settings of all shards; one in which they differ is a list."""
    first = settings[0]
    return {
        name: value
        if all(known.get(name) == value for known in settings)
        else [setting.get(name) for setting in settings]
        for name, value in first.items()
    }


def _unlike(folder: Path, name: str, value: object, other: Path, expected: object) -> InputError:
    return InputError(
        f"{folder / RUN_FILE}: {name} {value!r}, but in {other / RUN_FILE} {expected!r}.",
        hint="Shards of one evaluation have the same settings and model. If each shard read a "
        "file of its own, --slices data_path accepts that this setting differs.",
        place=str(folder / RUN_FILE),
    )
