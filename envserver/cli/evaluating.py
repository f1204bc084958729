"""What `evaluate` and `sweep` share: the environments that they run, and what they show.

A folder has environments (`*.py`, or `NAME/env.py`) and settings files (`*.yaml`) that each name an
environment: only their `env` and `sampling` are used, and flags override them.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml
from envserver_records.errors import ConfigError, InputError, UsageError
from rich.table import Table
from rich.text import Text

from ..evaluation.report import Report, Suite
from ..evaluation.tables import TextTable, notes_of, summary_of, tables_of, warnings_of
from ..folders import is_environment_folder
from ..registry import (
    builtin_names,
    defines_environment,
    entry_point_names,
    find,
    is_path,
)
from ..running.evaluating import EvaluationView
from ..running.group_run import GroupRun
from ..running.mix import RunSpec
from ..running.python_api import EVALUATION_DEFAULTS
from ..settings.config import MixSettings
from .command_line import CommandSpec, read_run_spec
from .console import Console
from .mixing import entries_of
from .progress import ProgressView, show_result
from .settings import once, to_stderr

M = TypeVar("M", bound=MixSettings)
Tree = Mapping[str, Any]
_NOT_AN_ENVIRONMENT = ("_", "test_", ".")
_OF_A_FILE = ("env", "sampling")
_SHOWN_OF_SEVERAL = ("Outcomes", "Tokens, time and cost")


@dataclass(frozen=True)
class _Wanted:
    reference: str
    place: str = ""
    tree: Tree = field(default_factory=dict)
    name: str = ""


def read_members(command: CommandSpec[M], argv: Sequence[str]) -> list[RunSpec[M]]:
    """At temperature 0 the group size is 1 unless another is given."""
    warn = once(to_stderr)
    seen: Counter[str] = Counter()
    found = []
    for item in _wanted(command, argv):
        spec = read_run_spec(
            command,
            argv,
            environment=item.reference,
            defaults=EVALUATION_DEFAULTS,
            over_file=(item.place, item.tree),
            warn=warn,
        )
        env = spec.settings.env
        if spec.settings.sampling.temperature == 0 and "group_size" not in env.model_fields_set:
            env.group_size = 1
        name = item.name or spec.environment_class.name
        seen[name] += 1
        if seen[name] > 1:
            name = f"{name}-{seen[name]}"
        found.append(replace(spec, name=name))
    return found


def _wanted(command: CommandSpec[M], argv: Sequence[str]) -> list[_Wanted]:
    entries, place = entries_of(command, argv)
    if entries is not None:
        found: list[_Wanted] = []
        for number, entry in enumerate(entries):
            own = _Wanted(entry.name, f"{place}[{number}]", {"env": entry.env})
            found += [own] if entry.env else _of_reference(entry.name)
        return found
    reference = command.named_environment(argv)
    if reference is None:
        raise UsageError(
            "`envserver evaluate` needs an environment: --env NAME, --env path/to/file.py, "
            "--env math,code for several, or --env FOLDER.",
            hint="`envserver list` shows the names.",
        )
    return _of_reference(reference)


def _of_reference(reference: str) -> list[_Wanted]:
    path = Path(reference)
    if reference in entry_point_names() or not path.is_dir():
        return [_Wanted(reference)]
    if is_environment_folder(path) and defines_environment(path):
        return [_Wanted(reference)]
    found = [wanted for path in sorted(path.iterdir()) for wanted in _of_path(path)]
    if not found:
        raise ConfigError(
            f"There is no environment in {reference}.",
            hint="It may contain *.py, NAME/env.py, and *.yaml with `environment: NAME`.",
        )
    return found


def _of_path(path: Path) -> list[_Wanted]:
    if path.name.startswith(_NOT_AN_ENVIRONMENT):
        return []
    if path.suffix in (".yaml", ".yml"):
        return [_of_file(path)]
    if path.suffix == ".py":
        return [_Wanted(str(path))] if defines_environment(path) else []
    file = path / "env.py"
    return [_Wanted(path.name if _is_builtin(path) else str(file))] if file.is_file() else []


def _is_builtin(folder: Path) -> bool:
    if folder.name not in builtin_names():
        return False
    return Path(inspect.getfile(find(folder.name))).parent == folder.resolve()


def _of_file(path: Path) -> _Wanted:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path} cannot be read: {error}.", place=str(path)) from error
    reference = tree.get("environment") if isinstance(tree, dict) else None
    if not isinstance(reference, str):
        raise InputError(f"{path} names no environment.", hint="Add `environment: math`.")
    kept = {name: value for name, value in tree.items() if name in _OF_A_FILE}
    if is_path(reference.partition(":")[0]) and not Path(reference).is_absolute():
        reference = str(path.parent / reference)
    return _Wanted(reference, str(path), kept, path.stem)


class Progress(EvaluationView):
    def __init__(self, console: Console) -> None:
        self._console = console
        self.show = partial(ProgressView, console)

    def say(self, line: str) -> None:
        self._console.say(line)


class Shown(Progress):
    def ended(self, run: GroupRun, settings: MixSettings) -> None:
        show_result(self._console, run, settings)

    def report(self, report: Report | Suite, folder: Path) -> None:
        show_report(self._console, report, folder)


def show_report(console: Console, report: Report | Suite, folder: Path) -> None:
    if isinstance(report, Suite):
        tables = [summary_of(report)]
        for part in report.parts:
            shown = [table for table in tables_of(part) if table.title in _SHOWN_OF_SEVERAL]
            tables += [
                TextTable(f"{part.name}: {table.title}", table.header, table.rows)
                for table in shown
            ]
        notes = warnings_of(report)
    else:
        tables, notes = tables_of(report), notes_of(report)
    show_tables(console, tables, notes)
    console.say(f"Report in {folder / 'report.html'}, report.md and report.json")


def show_tables(console: Console, tables: list[TextTable], notes: list[str]) -> None:
    for text in tables:
        table = Table(title=text.title, title_justify="left")
        for number, name in enumerate(text.header):
            table.add_column(Text(name), justify="right" if number else "left", overflow="fold")
        for row in text.rows:
            table.add_row(*map(Text, row))
        console.print(table)
    for note in notes:
        console.say(note)
