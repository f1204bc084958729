"""Reads trajectories from files, and checks them.

A document is a `.json` file, a line of `.jsonl` or a sample of a log of Inspect; an unreadable one
comes with the reason. Files that describe a folder (MANIFEST.json, SUMMARY.json) are skipped.
"""

from __future__ import annotations

import asyncio
import glob
import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

from envserver_records.errors import EnvserverError, InputError, NotFoundError

from envserver.export.stored_sources import opened
from envserver.export.unified import DOMAINS, problems_of

from ..exporting.inspect import LOST, REWARD, STORE, message_of, require_inspect


@dataclass(frozen=True)
class Document:
    """A document, or why it cannot be read."""

    path: Path
    line: int | None
    value: Any
    problem: str | None
    bytes: int
    part: str = ""

    @property
    def place(self) -> str:
        """`file.json`, or `file.jsonl, line 7`."""
        part = self.part if self.line is None else f"line {self.line}"
        return f"{self.path}, {part}" if part else str(self.path)


Json = dict[str, Any]

_VALUES: Final = {
    "C": 1.0,
    "P": 0.5,
    "I": 0.0,
    "N": 0.0,
    "yes": 1.0,
    "true": 1.0,
    "no": 0.0,
    "false": 0.0,
}
"""Inspect's own values of scores that are text."""


def is_inspect_log(value: Any) -> bool:
    spec = value.get("eval") if isinstance(value, dict) else None
    return isinstance(spec, dict) and "task" in spec and "status" in value


def inspect_documents(path: Path) -> Iterator[Document]:
    require_inspect()
    size = path.stat().st_size
    samples = _samples(path)
    number = 0
    while True:
        try:
            name, sample = next(samples)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001 - inspect_ai raises what ZIP, JSON, pydantic raise
            yield Document(path, None, None, f"no log of Inspect: {_reason(error)}", size)
            return
        number += 1
        value, problem = _read(sample)
        if value is not None or problem is not None:
            yield Document(path, None, value, problem, size if number == 1 else 0, part=name)


def _samples(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields each sample with its name; for one that cannot be read the error."""
    from inspect_ai._util.async_zip import AsyncZipReader
    from inspect_ai._util.asyncfiles import AsyncFilesystem
    from inspect_ai.log import (
        read_eval_log,
        read_eval_log_sample_async,
        read_eval_log_sample_summaries,
    )

    if path.suffix != ".eval":
        for sample in read_eval_log(path, format="json", resolve_attachments=True).samples or ():
            yield f"sample {sample.id}, epoch {sample.epoch}", sample
        return
    summaries = read_eval_log_sample_summaries(path, format="eval")
    with asyncio.Runner() as runner:
        # One reader for all samples: each new one would read the file's directory again.
        reader = AsyncZipReader(AsyncFilesystem(), str(path))
        for summary in summaries:
            reading = read_eval_log_sample_async(
                str(path), summary.id, summary.epoch, resolve_attachments=True, reader=reader
            )
            try:
                read: Any = runner.run(reading)
            except Exception as error:  # noqa: BLE001 - as above
                read = error
            yield f"sample {summary.id}, epoch {summary.epoch}", read


def _read(sample: Any) -> tuple[Any, str | None]:
    """Returns a sample's document, or why there is none; neither for a lost rollout."""
    if isinstance(sample, Exception):
        return None, f"cannot be read: {_reason(sample)}"
    ours = sample.store.get(STORE)
    try:
        if ours is not None:
            return _line(ours, [message_of(one) for one in sample.messages]), None
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        return None, f"its store is not that of a rollout: {_reason(error)}"
    if sample.error is not None:
        lost = LOST in sample.metadata
        return None, None if lost else f"ended with an error: {sample.error.message[:200]}"
    return _foreign(sample), None


def _line(ours: Json, messages: list[Json]) -> Json:
    (rollout,) = ours["envserver"]["rollouts"]
    rollout = {**rollout, "messages": messages}
    return {**ours, "envserver": {**ours["envserver"], "rollouts": [rollout]}}


def _foreign(sample: Any) -> Json:
    asked = sample.input if isinstance(sample.input, str) else None
    name = str(sample.id) if sample.epoch == 1 else f"{sample.id}-epoch-{sample.epoch}"
    document = {
        "task_id": name,
        "question": asked,
        "messages": [message_of(one) for one in sample.messages],
        "final_answer": sample.output.completion,
        "model": sample.output.model,
        "score": _score(sample),
        "start_ts": _seconds(sample.started_at),
        "end_ts": _seconds(sample.completed_at),
        "target": sample.target,
        "sample": sample.metadata,
        "limit": sample.limit.type if sample.limit else None,
    }
    return {key: value for key, value in document.items() if value not in (None, "", [], {})}


def _score(sample: Any) -> Json:
    numbers: dict[str, float] = {}
    for scorer, score in (sample.scores or {}).items():
        value = score.value
        parts = value if isinstance(value, dict) else {"": value}
        for name, part in parts.items():
            if (number := _number(part)) is not None:
                numbers[f"{scorer}/{name}" if name else scorer] = number
    total = numbers.get(REWARD)
    if total is None and len(numbers) == 1:
        (total,) = numbers.values()
    return numbers if total is None else {**numbers, "total": total}


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        return _VALUES.get(value, _VALUES.get(value.lower()))
    if isinstance(value, (bool, int, float)) and math.isfinite(value):
        return float(value)
    return None


def _seconds(moment: str | None) -> float | None:
    return datetime.fromisoformat(moment).timestamp() if moment else None


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst")
INSPECT = ".eval"
MAX_BYTES = 256 << 20
"""Maximum size of one document."""
_ABOUT_A_FOLDER = ("MANIFEST.json", "SUMMARY.json", "summary.json")


def files_of(sources: Sequence[str]) -> list[Path]:
    """Returns the files that `sources` name, each once, sorted by path."""
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


OnProgress = Callable[[int, int], None]
"""Called with the numbers of documents and bytes read so far."""
Bad = Callable[[str, str], None]
"""Called with the place of a document (`file.json`; `file.jsonl, line 7`) and a problem."""


@dataclass
class Report:
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
