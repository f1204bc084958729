"""Converts files of trajectories in any known form to unified trajectories.

In: JSON or JSONL documents, each one of: a unified trajectory; a trace of the text protocol
(`traces`); a group of `envserver process`; a foreign trajectory (`convert_foreign`); and samples of
Inspect's logs (`inspect_logs`). Out: for each trajectory OUT/DOMAIN/TASK_ID.json, or a line of OUT
where that is a .jsonl file. What holds: every written trajectory is valid (`problems_of`), task ids
are unique, and each skipped document is reported with its place and the reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from envserver_records.errors import ConfigError, InputError
from envserver_records.files import replacing, storing

from envserver.export.formats import Options
from envserver.export.stored import group_of
from envserver.export.traces import problems_of_trace, unified_of_trace
from envserver.export.unified import DOMAINS, SCHEMA_VERSION, problems_of, write_json
from envserver.export.unified_format import Unified

from ..sft_building.spool import as_line
from .convert_foreign import unified_of_foreign
from .documents import Document, documents, files_of

Json = dict[str, Any]
OnProgress = Callable[[int, int], None]
"""Called with the numbers of documents and bytes read so far."""
Failed = Callable[[str, str], None]
"""Called with the place of a skipped document and the reason."""


@dataclass
class Report:
    """Counts of a conversion.

    Args:
        read, failed: documents.
        written: trajectories by domain.
    """

    read: int = 0
    failed: int = 0
    written: dict[str, int] = field(default_factory=dict)


def convert(
    sources: Sequence[str],
    out: Path,
    *,
    domain: str | None = None,
    tokens: bool = False,
    failed: Failed = lambda place, reason: None,
    on_progress: OnProgress = lambda count, size: None,
) -> Report:
    """Writes the trajectories of `sources` below `out`; files of the same name are replaced.

    Args:
        sources: files, folders and globs.
        out: a folder, or a .jsonl file, which is written atomically. A folder that is called as
            `domain` takes the files itself: no second folder of this name is made in it.
        domain: domain of foreign trajectories; unset: as they state, else their folder's name.
        tokens: include the training rows of groups, and of logs of Inspect that have them.
        failed: called for each skipped document; the others are still written.
    """
    if domain is not None and domain not in DOMAINS:
        raise ConfigError(f"There is no domain {domain!r}.", hint=f"One of {', '.join(DOMAINS)}.")
    report = Report()
    converter = Converter(domain, tokens=tokens)
    size = 0
    with _sink(out, domain) as sink:
        for document in documents(files_of(sources)):
            report.read += 1
            size += document.bytes
            try:
                for trajectory in converter.trajectories(document):
                    sink.put(trajectory)
                    name = trajectory["domain"]
                    report.written[name] = report.written.get(name, 0) + 1
            except (InputError, ValueError, RecursionError) as error:
                report.failed += 1
                failed(document.place, _reason(error))
            on_progress(report.read, size)
    return report


class Converter:
    """Converts documents to unified trajectories and keeps ids unique.

    Args:
        domain, tokens: see `convert`.
    """

    def __init__(self, domain: str | None = None, *, tokens: bool = False) -> None:
        self._domain = domain
        self._groups = Unified(Options(jsonl=True, tokens=tokens))
        self._seen: dict[bytes, str] = {}

    def trajectories(self, document: Document) -> list[Json]:
        """Returns the trajectories in `document`, all valid, with ids not used before.
        Raises ValueError, InputError: it holds none, or one that is invalid.
        """
        if document.problem is not None:
            raise ValueError(document.problem)
        value, place = document.value, document.place
        if isinstance(value, dict) and "tokens" in value and "scores" in value:
            group = group_of(value, place)
            made = [row for row in self._groups.rows(group, group.rollouts) if type(row) is dict]
        else:
            made = [self._single(document)]
            if problems := problems_of(made[0]):
                raise ValueError("; ".join(problems[:3]))
        digests = [_digest(one["task_id"]) for one in made]
        for digest, trajectory in zip(digests, made, strict=True):
            if digest in self._seen:
                where = self._seen[digest]
                raise ValueError(f"its task id {trajectory['task_id']!r} is that of {where}, too")
        self._seen |= dict.fromkeys(digests, place)
        return made

    def _single(self, document: Document) -> Json:
        value = document.value
        if isinstance(value, dict) and value.get("schema_version") == SCHEMA_VERSION:
            return value
        if _is_trace(value):
            if problems := problems_of_trace(value):
                raise ValueError(f"a trace, but {'; '.join(problems[:3])}")
            return unified_of_trace(value, domain=self._domain or "swe")
        found = self._domain or _own_domain(value) or _folder_domain(document.path)
        if found is None:
            raise ValueError(f"its domain is not known (--domain, one of {', '.join(DOMAINS)})")
        own = _own_id(value) or _name(document)
        task_id = own if own.startswith(f"{found}-") else f"{found}-{own}"
        return unified_of_foreign(value, task_id=task_id, domain=found)


def file_name(task_id: str) -> str:
    """Returns the file name of a task: its id, or as much of it as a file name allows."""
    plain = "".join(one if one.isalnum() or one in "-_.,+=@ :" else "_" for one in task_id)
    if plain == task_id and len(task_id.encode()) <= 200 and not task_id.startswith("."):
        return f"{task_id}.json"
    short = plain.encode()[:150].decode(errors="ignore").lstrip(".")
    return f"{short}-{hashlib.sha256(task_id.encode()).hexdigest()[:12]}.json"


def _digest(task_id: str) -> bytes:
    return hashlib.blake2b(task_id.encode(), digest_size=12).digest()


def _name(document: Document) -> str:
    """Names a document without an id of its own: its file, and its line there."""
    if document.line is None:
        return document.path.stem
    return f"{document.path.name.partition('.jsonl')[0]}-{document.line:06d}"


def _reason(error: Exception) -> str:
    said = error.message if isinstance(error, InputError) else str(error)
    return "nested too deeply" if isinstance(error, RecursionError) else said.rstrip(".")


def _is_trace(value: Any) -> bool:
    """Returns whether it looks like a trace: steps of the text protocol, numbered by `i`."""
    if not isinstance(value, dict) or "run_id" not in value:
        return False
    steps = value.get("steps")
    return isinstance(steps, list) and all(isinstance(s, dict) and "i" in s for s in steps)


def _own_domain(value: Any) -> str | None:
    found = value.get("domain") if isinstance(value, dict) else None
    return found if found in DOMAINS else None


def _folder_domain(path: Path) -> str | None:
    return next((one for one in reversed(path.parent.parts) if one in DOMAINS), None)


def _own_id(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    for key in ("task_id", "instance_id", "id"):
        found = value.get(key)
        if isinstance(found, (str, int)) and not isinstance(found, bool) and str(found).strip():
            return str(found)
    return None


class _Sink(Protocol):
    def __enter__(self) -> _Sink: ...
    def __exit__(self, kind: Any, error: Any, trace: Any) -> None: ...
    def put(self, trajectory: Json) -> None: ...


def _sink(out: Path, domain: str | None) -> _Sink:
    if out.suffix == ".jsonl":
        return _Lines(out)
    return _Folder(out.parent if domain is not None and out.name == domain else out)


class _Folder:
    """Writes a file for each trajectory, each atomically."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def __enter__(self) -> _Folder:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Does nothing: every file is already closed."""

    def put(self, trajectory: Json) -> None:
        place = self._out / trajectory["domain"] / file_name(trajectory["task_id"])
        try:
            write_json(place, trajectory)
        except TypeError as error:  # a number beyond 64 bits, half of a pair of surrogates
            raise ValueError(f"not to be written as JSON: {error}") from error


class _Lines:
    """Writes one file of lines, which gets its name when all lines are on disk."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._stack = ExitStack()

    def __enter__(self) -> _Lines:
        with storing(self._out):
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._stack.enter_context(replacing(self._out))
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with storing(self._out):
            self._stack.__exit__(kind, error, trace)

    def put(self, trajectory: Json) -> None:
        with storing(self._out):
            self._file.write(as_line(trajectory))
