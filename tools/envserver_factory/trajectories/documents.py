"""Reads trajectories from files: one document for each `.json` file, one for each line of `.jsonl`,
one for each sample of a log of Inspect.

In: files, folders (recursively) and globs. Out: each document with its place, one at a time, files
in the order of their paths; an unreadable document comes with the reason. Files that describe a
folder (MANIFEST.json, SUMMARY.json) are skipped.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from envserver_records.errors import EnvserverError, InputError, NotFoundError

from envserver.export.stored_files import opened

from .document import Document as Document
from .inspect_logs import inspect_documents, is_inspect_log

LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst")
INSPECT = ".eval"
MAX_BYTES = 256 << 20
"""Maximum size of one document."""
_ABOUT_A_FOLDER = ("MANIFEST.json", "SUMMARY.json", "summary.json")


def files_of(sources: Sequence[str]) -> list[Path]:
    """Returns the files that `sources` name, each once, sorted by path.
    Raises NotFoundError: a source names no file.
    """
    found: dict[str, Path] = {}
    for source in sources:
        files = list(_files(source))
        if not files:
            raise NotFoundError(
                f"{source!r} names no .json, .jsonl or .eval file.",
                hint="Give files, folders, or globs in quotes.",
            )
        found |= {str(path): path for path in files}
    return [found[name] for name in sorted(found)]


def documents(files: Iterable[Path]) -> Iterator[Document]:
    """Yields the documents in `files`, one at a time."""
    for path in files:
        if path.name.endswith(LINES):
            yield from _lines(path)
        elif path.suffix == INSPECT:
            yield from inspect_documents(path)
        else:
            document = _whole(path)
            is_log = is_inspect_log(document.value)
            yield from inspect_documents(path) if is_log else [document]


def objects(sources: Sequence[str]) -> Iterator[Document]:
    """Yields the documents of `sources`, all of which must be JSON objects."""
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
    return path.name.endswith((".json", INSPECT, *LINES)) and ".failures.jsonl" not in path.name


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
    raise ValueError(f"{name} is not a number")
