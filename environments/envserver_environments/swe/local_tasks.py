"""Tasks in folders, without git and without images.

    task.json   the keys of a SWE-bench row, and where the rest is: `repo_archive` (a tar of the
                tree), `hidden_tests` (a folder), each below the folder of task.json; optional are
                `protected` (patterns of further files whose changes do not count), `wall` (seconds
                for the tests), `python` (">=3.10") and `requires` (packages that must be here)
    repo.tar    the repository at its commit
    hidden/     files that replace the visible ones for grading

Tests are always run by our own pytest: what `test_cmd` says is not executed.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envserver_environments.rows import NumberedRow

from envserver import InputError

from .repositories import archived_tree
from .trees import Entry, Tree

TASK = "task.json"
FOLDER = "folder"
"""Key of a row, set here: where its task.json was found."""
_MINIMUM = re.compile(r">=\s*(\d+)\.(\d+)")


def task_folders(path: Path) -> list[Path]:
    """Returns the folders of tasks: `path` itself, or those in it; empty if it holds other data."""
    if (path / TASK).is_file():
        return [path]
    return sorted(found.parent for found in path.glob(f"*/{TASK}")) if path.is_dir() else []


def folder_rows(folders: list[Path]) -> Iterator[NumberedRow]:
    """Yields the rows of such folders, with their paths."""
    for number, folder in enumerate(folders):
        place = str(folder / TASK)
        try:
            row = json.loads((folder / TASK).read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            yield NumberedRow(number, None, place, f"it is not JSON: {error}")
            continue
        good = {**row, FOLDER: str(folder)} if isinstance(row, dict) else None
        yield NumberedRow(number, good, place, "" if good else "it is not a JSON object")


def read_folder(row: dict[str, Any], folder: Path) -> tuple[str, Tree, Tree]:
    """Returns the path of a task's archive, the tree in it, and the files for grading."""
    _check_needs(row)
    archive = _below(folder, str(row["repo_archive"]))
    place = _below(folder, str(row.get("hidden_tests") or "hidden"))
    tree = archived_tree(str(archive))
    found = sorted(path for path in place.rglob("*") if path.is_file())
    files = {
        path.relative_to(place).as_posix(): Entry(path.read_bytes())
        for path in found
        if "__pycache__" not in path.parts
    }
    if not files:
        raise InputError("Its hidden tests are not there.")
    return str(archive), tree, files


def rules_of(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the task's own rules for grading: `protected` and `seconds`."""
    protected, wall = row.get("protected") or [], row.get("wall")
    if not isinstance(protected, list) or not all(isinstance(part, str) for part in protected):
        raise InputError("Its protected files are not a list of patterns.")
    rules: dict[str, Any] = {"protected": protected}
    if isinstance(wall, int | float) and wall > 0:
        rules["seconds"] = float(wall)
    return rules


def _below(folder: Path, name: str) -> Path:
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise InputError("A file of the task is outside of its folder.")
    return path


def _check_needs(row: dict[str, Any]) -> None:
    minimum = _MINIMUM.search(str(row.get("python") or ""))
    if minimum and sys.version_info[:2] < (int(minimum[1]), int(minimum[2])):
        raise InputError("It needs a newer Python.")
    for wanted in row.get("requires") or ():
        name = re.split(r"[^\w.-]", str(wanted).strip(), maxsplit=1)[0]
        try:
            importlib.metadata.version(name)
        except (importlib.metadata.PackageNotFoundError, ValueError) as error:
            raise InputError("It needs a package that is not here.") from error
