"""Rows of GAIA, or of any tasks in its shape: the own ones that ship, or a local copy.

In: a folder. Out: Items, in the order of the files, in any layout: `metadata.parquet` (today),
`metadata.level1.parquet` and so on, or `metadata.jsonl` (older, and our own tasks), in
`2023/<split>/`, in `<split>/` or in the folder itself. Solutions that annotators wrote are never
read. What cannot be used is a Refusal, never an exception: the reason is counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envserver_records.extras import install_command

from envserver import ConfigError, InputError, NotFoundError, Split

from .scoring import is_usable_truth

OWN = Path(__file__).parent / "data"
DEFAULT_COPY = Path("data/gaia")
YEAR = "2023"
LEVELS = (1, 2, 3)

_COLUMNS = ("task_id", "Question", "Level", "Final answer", "file_name", "file_path")


@dataclass(frozen=True)
class GaiaQuestion:
    """One task as its author wrote it.

    Args:
        task_id: the author's.
        attachment: the file that belongs to it.
        solution: Python that prints the answer, if the author gave one (built-in tasks have one).
    """

    task_id: str
    question: str
    level: int
    answer: str
    attachment: Path | None
    solution: str | None


@dataclass(frozen=True)
class Refusal:
    """A row that is of no use, and why."""

    task_id: str
    reason: str


def own_items() -> Iterator[GaiaQuestion | Refusal]:
    """The tasks that ship with the environment."""
    return _items(_jsonl(OWN / "metadata.jsonl"), OWN, OWN)


def is_official(copy: Path) -> bool:
    """Returns whether a copy has the layout of GAIA itself, which must not be trained on."""
    folder = copy.resolve()
    return (folder / YEAR).is_dir() or folder.name == YEAR or folder.parent.name == YEAR


def copy_items(copy: Path, split: Split) -> Iterator[GaiaQuestion | Refusal]:
    """Returns the rows of a local copy.

    Args:
        split: an official copy has answers for "validation" only; copies without folders for splits
        are the same for each.

    Raises:
        NotFoundError: there is no copy, or it has no such split.
        ConfigError: the Parquet reader is not installed, or a file is damaged.
    """
    folder = _folder_of_split(copy, split)
    return _items(_rows(folder), copy, folder)


def read_row(row: dict[str, Any], root: Path, folder: Path) -> GaiaQuestion:
    """Reads one row.

    Args:
        root, folder: where its file may be: the folders of the copy and of the split.

    Raises:
        InputError: it is not usable; the message is counted as the reason.
    """
    question, answer = row.get("Question"), row.get("Final answer")
    if not isinstance(question, str) or not question.strip():
        raise InputError("no question")
    if not isinstance(answer, str) or not is_usable_truth(answer):
        raise InputError("no answer to compare with")
    level = str(row.get("Level", "")).strip()
    if level not in map(str, LEVELS):
        raise InputError("no level")
    solution = row.get("Solution")
    return GaiaQuestion(
        task_id=str(row.get("task_id") or ""),
        question=question,
        level=int(level),
        answer=answer,
        attachment=_attachment(row, root, folder),
        solution=solution if isinstance(solution, str) else None,
    )


def _items(
    rows: Iterator[dict[str, Any]], root: Path, folder: Path
) -> Iterator[GaiaQuestion | Refusal]:
    for row in rows:
        try:
            yield read_row(row, root, folder)
        except InputError as error:
            yield Refusal(str(row.get("task_id") or ""), error.message)


def _attachment(row: dict[str, Any], root: Path, folder: Path) -> Path | None:
    name = row.get("file_name") or ""
    if not name:
        return None
    inside = [folder.relative_to(root) / str(name)]
    if row.get("file_path"):
        inside.append(Path(str(row["file_path"])))
    for path in inside:
        # Links lead into the cache of the hub's client: the place counts, not where it leads.
        if path.is_absolute() or ".." in path.parts:
            raise InputError("its file is outside of the copy")
        if (root / path).is_file():
            return root / path
    raise InputError("its file is missing")


def _folder_of_split(copy: Path, split: Split) -> Path:
    if not copy.is_dir():
        raise NotFoundError(
            f"There is no folder {str(copy)!r}.",
            hint="python -m envserver_environments.gaia.download",
        )
    for folder in (copy / YEAR / split, copy / split, copy):
        if folder.is_dir() and _metadata_files(folder):
            return folder
    raise NotFoundError(
        f"{copy} has no metadata.parquet and no metadata.jsonl of the split {split!r}.",
        hint="python -m envserver_environments.gaia.download fetches the missing files.",
    )


def _metadata_files(folder: Path) -> list[Path]:
    """Returns the files that describe all tasks of a folder; level files repeat their rows."""
    for name in ("metadata.parquet", "metadata.jsonl"):
        if (folder / name).is_file():
            return [folder / name]
    return sorted(folder.glob("metadata.level[123].parquet"))


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    for file in _metadata_files(folder):
        yield from _jsonl(file) if file.suffix == ".jsonl" else _parquet(file)


def _jsonl(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise ConfigError(f"{file}, line {number}: no JSON object.", hint="Fetch it again.")
            row.pop("Annotator Metadata", None)
            yield row


def _parquet(file: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ConfigError(
            f"Reading {file.name} needs the library pyarrow.", hint=install_command("gaia")
        ) from error
    try:
        table = parquet.ParquetFile(file)
        columns = [name for name in _COLUMNS if name in table.schema_arrow.names]
        rows = table.read(columns=columns).to_pylist()
    except Exception as error:
        raise ConfigError(
            f"{file} cannot be read: {type(error).__name__}: {error}", hint="Fetch it again."
        ) from error
    yield from rows
