"""Trajectories as they lie in files: one document to a `.json` file, one to a line of `.jsonl`.

In: files, folders (with all below them) and globs. Out: each document with its place, one at a
time, files in the order of their paths; a document that cannot be read comes with the reason. What
describes a folder (MANIFEST.json, SUMMARY.json) is no document.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from envserver_records.errors import EnvserverError, InputError, NotFoundError

from .stored_sources import opened

LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst")
MAX_BYTES = 256 << 20
"""Of one document."""
_ABOUT_A_FOLDER = ("MANIFEST.json", "SUMMARY.json", "summary.json")


@dataclass(frozen=True)
class Document:
    """A document, or why there is none.

    Args:
        line: of a file of lines, from 1.
        value: the JSON value, None where it cannot be read.
        problem: why it cannot be.
        bytes: its size.
    """

    path: Path
    line: int | None
    value: Any
    problem: str | None
    bytes: int

    @property
    def place(self) -> str:
        """For people: `file.json`, or `file.jsonl, line 7`."""
        return str(self.path) if self.line is None else f"{self.path}, line {self.line}"


def files_of(sources: Sequence[str]) -> list[Path]:
    """The files that `sources` mean, each once, in the order of their paths as texts.

    Raises:
        NotFoundError: one of them means none.
    """
    found: dict[str, Path] = {}
    for source in sources:
        files = list(_files(source))
        if not files:
            raise NotFoundError(
                f"{source!r} names no .json or .jsonl file.",
                hint="Give files, folders, or globs in quotes.",
            )
        found |= {str(path): path for path in files}
    return [found[name] for name in sorted(found)]


def documents(files: Iterable[Path]) -> Iterator[Document]:
    """What stands in `files`, one document at a time."""
    for path in files:
        yield from _lines(path) if path.name.endswith(LINES) else [_whole(path)]


def objects(sources: Sequence[str]) -> Iterator[Document]:
    """The documents of `sources` where all must be JSON objects.

    Raises:
        NotFoundError: see `files_of`.
        InputError: one is something else; with its place.
    """
    for document in documents(files_of(sources)):
        problem = document.problem
        if problem is None and not isinstance(document.value, dict):
            problem = "no JSON object"
        if problem is not None:
            raise InputError(f"{document.place}: {problem}.", place=document.place)
        yield document


def _files(source: str) -> Iterator[Path]:
    path = Path(source)
    if path.is_dir():
        yield from (
            one for one in path.rglob("*") if _is_document(one.relative_to(path)) and one.is_file()
        )
    elif path.is_file():
        yield path
    elif any(letter in source for letter in "*?["):
        for name in glob.glob(source, recursive=True):  # noqa: PTH207 - absolute globs, too
            yield from _files(name) if Path(name).is_dir() else [Path(name)]


def _is_document(path: Path) -> bool:
    if any(part.startswith(".") for part in path.parts) or path.name in _ABOUT_A_FOLDER:
        return False
    return path.name.endswith((".json", *LINES)) and ".failures.jsonl" not in path.name


def _whole(path: Path) -> Document:
    try:
        data = path.read_bytes()
    except OSError as error:
        return Document(path, None, None, f"cannot be read: {error.strerror}", 0)
    return _document(path, None, data)


def _lines(path: Path) -> Iterator[Document]:
    number = 0
    try:
        with opened(path) as file:
            while data := file.readline(MAX_BYTES):
                number += 1
                if data.strip():
                    yield _document(path, number, data)
    except (EnvserverError, OSError) as error:
        yield Document(path, number + 1, None, f"cannot be read: {error}", 0)


def _document(path: Path, line: int | None, data: bytes) -> Document:
    try:
        text = data.decode("utf-8-sig")
        value = json.loads(text, parse_constant=_refuse)
    except UnicodeDecodeError as error:
        problem = f"no UTF-8: {error.reason} at byte {error.start}"
    except json.JSONDecodeError as error:
        problem = f"no JSON: {error.msg} at line {error.lineno}, column {error.colno}"
    except ValueError as error:
        problem = f"no JSON: {error}"
    except RecursionError:
        problem = "no JSON: nested too deeply"
    else:
        return Document(path, line, value, None, len(data))
    return Document(path, line, None, problem, len(data))


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")
