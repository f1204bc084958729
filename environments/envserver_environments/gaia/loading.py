"""Rows of GAIA, or of any tasks in its shape, in any layout: `metadata.parquet` (today),
`metadata.level1.parquet` and so on, or `metadata.jsonl` (older, and our own tasks), in
`2023/<split>/`, in `<split>/` or in the folder itself. Solutions that annotators wrote are never
used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envserver_environments.rows import (
    Row,
    file_rows,
    last_message,
    made,
    missing,
    published,
    roles_of,
    text_of,
    value_at,
)

from envserver import InputError, NotFoundError, Split

from .scoring import is_usable_truth

OWN = Path(__file__).parent / "data"
DEFAULT_COPY = Path("data/gaia")
YEAR = "2023"
LEVELS = (1, 2, 3)
_BY_LEVEL = "metadata.level[123].parquet"

ROLES, _ = published(__file__)


_UNCLEAR: dict[type, str] = {
    bool: "true or false: write the word that the question asks for, such as yes",
    list: "a list: write one text with commas, or name another field by --env.columns",
    dict: "an object: name the field in it by --env.columns, such as answer.value",
}


@dataclass(frozen=True)
class GaiaQuestion:
    """One task as its author wrote it."""

    task_id: str  # the author's
    question: str
    level: int
    answer: str
    attachment: Path | None  # the file that belongs to it
    solution: str | None  # Python that prints the answer, of built-in tasks


def is_official(copy: Path) -> bool:
    """Returns whether a copy has the layout of GAIA itself, which must not be trained on."""
    folder = copy.resolve()
    return (folder / YEAR).is_dir() or folder.name == YEAR or folder.parent.name == YEAR


def read_copy(
    copy: Path, split: Split, seed: int = 0, columns: Mapping[str, str] | None = None
) -> Iterator[tuple[str, GaiaQuestion | str]]:
    """Returns the place of each row, and its question or why there is none. An official copy has
    answers for "validation" only; copies without folders for splits are the same for each."""
    files = copy if copy.is_file() else _metadata(copy, split)
    root = copy.parent if copy.is_file() else copy
    rows = file_rows(files, split, seed)
    return made(rows, lambda row, _: read_row(row, root, files.parent, columns))


def read_row(
    row: Row, root: Path, folder: Path, columns: Mapping[str, str] | None = None
) -> GaiaQuestion:
    """Reads a row whose file is in `root` or `folder`, the folders of the copy and of the split."""
    columns = columns or {}
    found = {role: text_of(_one(value)) for role, value in roles_of(row, ROLES, columns).items()}
    if not found.get("answer"):
        names = (columns["answer"],) if "answer" in columns else ROLES["answer"]
        kinds = [type(_one(value_at(row, name))) for name in names]
        if why := next((_UNCLEAR[kind] for kind in kinds if kind in _UNCLEAR), ""):
            raise InputError(f"its answer is {why}")
    if lacking := [role for role in ("question", "answer") if not found.get(role)]:
        raise missing(row, lacking[:1])
    if not is_usable_truth(found["answer"]):
        raise InputError("no answer to compare with")
    # A table with empty cells has floats.
    level = found.get("level", "1").strip().removesuffix(".0")
    if level not in map(str, LEVELS):
        raise InputError(f"its level is not one of {', '.join(map(str, LEVELS))}")
    return GaiaQuestion(
        task_id=found.get("task_id", ""),
        question=found["question"],
        level=int(level),
        answer=found["answer"],
        attachment=_attachment(found, root, folder),
        solution=found.get("solution"),
    )


def _one(value: Any) -> Any:
    value = last_message(value)
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _attachment(found: Mapping[str, str], root: Path, folder: Path) -> Path | None:
    if not found.get("file"):
        return None
    for place in (folder.relative_to(root) / found["file"], found.get("path", "")):
        # Links lead into the cache of the hub's client: the place counts, not where it leads.
        path = Path(place)
        if path.is_absolute() or ".." in path.parts:
            raise InputError("its file is outside of the copy")
        if (root / path).is_file():
            return root / path
    raise InputError("its file is missing")


def _metadata(copy: Path, split: Split) -> Path:
    if not copy.is_dir():
        raise NotFoundError(
            f"There is no folder {str(copy)!r}.",
            hint="python -m envserver_environments.gaia.download",
        )
    for folder in (copy / YEAR / split, copy / split, copy):
        for name in ("metadata.parquet", "metadata.jsonl"):
            if (folder / name).is_file():
                return folder / name
        if any(folder.glob(_BY_LEVEL)):
            return folder / _BY_LEVEL
    raise NotFoundError(
        f"{copy} has no metadata.parquet and no metadata.jsonl of the split {split!r}.",
        hint="python -m envserver_environments.gaia.download fetches the missing files.",
    )
