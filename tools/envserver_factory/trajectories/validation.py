"""Validates files of unified trajectories: schema, steps, times, numbers, and unique ids.

In: files, folders and globs; one trajectory for each JSON file, one for each line of JSONL. Out:
every problem with its place, as it is found. A task id takes twelve bytes of memory; it must be
unique within a file of lines, and among the files of one folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from envserver.export.unified import DOMAINS, problems_of

from .documents import Document, documents, files_of

OnProgress = Callable[[int, int], None]
"""Called with the numbers of documents and bytes read so far."""
Bad = Callable[[str, str], None]
"""Called with the place of a document (`file.json`; `file.jsonl, line 7`) and a problem."""


@dataclass
class Report:
    """Counts of a validation."""

    files: int = 0
    bad_files: int = 0
    documents: int = 0
    bad: int = 0


def validate(
    sources: Sequence[str],
    *,
    bad: Bad = lambda place, reason: None,
    on_progress: OnProgress = lambda count, size: None,
    domains: Collection[str] = DOMAINS,
) -> Report:
    """Checks every trajectory of `sources`."""
    report = Report()
    seen: dict[Path, set[bytes]] = {}
    wrong: set[Path] = set()
    size = 0
    files = files_of(sources)
    for document in documents(files):
        report.documents += 1
        size += document.bytes
        problems = _problems(document, seen, domains)
        report.bad += bool(problems)
        if problems:
            wrong.add(document.path)
        for problem in problems:
            bad(document.place, problem)
        on_progress(report.documents, size)
    report.files, report.bad_files = len(files), len(wrong)
    return report


def _problems(
    document: Document, seen: dict[Path, set[bytes]], domains: Collection[str]
) -> list[str]:
    if document.problem is not None:
        return [document.problem]
    try:
        problems = problems_of(document.value, domains=domains)
    except RecursionError:
        return ["nested too deeply"]
    task_id = document.value.get("task_id") if isinstance(document.value, dict) else None
    if isinstance(task_id, str):
        among = document.path.parent if document.line is None else document.path
        digest = hashlib.blake2b(task_id.encode(errors="replace"), digest_size=12).digest()
        ids = seen.setdefault(among, set())
        if digest in ids:
            problems.append(f"$.task_id: {task_id[:80]!r} appears twice")
        ids.add(digest)
    return problems
