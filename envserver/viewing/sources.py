"""What the arguments of `envserver view` name; files of groups are not read here."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from envserver_records.errors import ConfigError, InputError, NotFoundError

from ..evaluation.folders import RunFile, groups_path, read_run_file
from ..export.jsonl import failures_path
from ..export.stored_sources import DATABASES, ENDINGS, SERVERS, files_of, is_sqlite
from ..rollouts.events import GroupDropped, RolloutFailed
from ..trainers.live import FailureLog
from ..trainers.live_events import Feed

Kind = Literal["file", "folder", "store", "server", "evaluation", "comparison"]

_NOT_DOCUMENTS: Final = frozenset(
    {"run.json", "report.json", "comparison.json", "index.json", "manifest.json", "summary.json"}
)


class ViewedFile(msgspec.Struct, frozen=True):
    path: str
    run: str = ""
    part: str = ""
    baseline: str = ""


class Viewed(msgspec.Struct, frozen=True):
    kind: Kind
    title: str
    places: list[str]
    runs: list[str] = []

    @property
    def is_on_disk(self) -> bool:
        return self.kind not in ("store", "server")

    def files(self) -> list[ViewedFile]:
        found: list[ViewedFile] = []
        for place, run in zip(self.places, self.runs, strict=True):
            found += _files(place, run if len(self.runs) > 1 else "")
        for source in found:
            _check_name(source.path)
        return found


def viewed(places: Sequence[str]) -> Viewed:
    if pipes := [place for place in places if place == "-" or Path(place).is_fifo()]:
        raise ConfigError(f"{pipes[0]} is a pipe, which cannot be read twice.")
    titles = [_title(place) for place in places]
    alone = [kind for place in places if (kind := _alone(place))]
    if alone and len(places) > 1:
        raise ConfigError(
            f"A {alone[0]} can only be viewed alone.",
            hint="To compare runs, give files or folders.",
        )
    if alone:
        return Viewed(alone[0], titles[0], list(places))
    if len(places) > 1:
        runs = _distinct([_name(place) for place in places])
        return Viewed("comparison", " and ".join(runs), list(places), runs)
    (place,) = places
    path = Path(place)
    if is_evaluation(path):
        return Viewed("evaluation", titles[0], [place], [_name(place)])
    return Viewed("file" if path.is_file() else "folder", titles[0], [place], [_name(place)])


def _check_name(path: str) -> None:
    if not path.isascii() and any("\ud800" <= sign <= "\udfff" for sign in path):
        raise InputError(f"The name {path!r} is not UTF-8.", hint="Rename the file or the folder.")


def is_evaluation(folder: Path) -> bool:
    try:
        return folder.is_dir() and read_run_file(folder) not in (None, RunFile())
    except InputError:
        return False  # another program's run.json


def _alone(place: str) -> Literal["server", "store"] | None:
    if place.startswith(SERVERS):
        return "server"
    if place.startswith(DATABASES) or is_sqlite(Path(place)) or _store_in(Path(place)):
        return "store"
    return None


def store_at(place: str) -> str:
    """Returns the path or URL of a store: of the only one in a folder, too."""
    found = _store_in(Path(place))
    return place if found is None else str(found)


def _store_in(folder: Path) -> Path | None:
    if not folder.is_dir():
        return None
    found = [path for path in sorted(folder.iterdir()) if path.is_file() and is_sqlite(path)]
    found = [path for path in found if not path.name.endswith(".index")]
    lines = any(path.name.endswith(ENDINGS) for path in folder.iterdir())
    return found[0] if len(found) == 1 and not lines else None


def _files(place: str, run: str) -> list[ViewedFile]:
    folder = Path(place)
    if is_evaluation(folder):
        return _of_evaluation(folder, run)
    try:
        return [ViewedFile(str(path), run) for path in files_of(place)]
    except NotFoundError:
        documents = _documents(folder)
        if not documents:
            raise
        return [ViewedFile(str(path), run) for path in documents]


def _documents(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    found = sorted(path for path in folder.rglob("*.json") if not path.name.startswith("."))
    return [path for path in found if path.name.lower() not in _NOT_DOCUMENTS and path.is_file()]


def _of_evaluation(folder: Path, run: str) -> list[ViewedFile]:
    noted = read_run_file(folder)
    if noted is None:
        return []
    found = []
    if noted.evaluated is not None:
        part = noted.name or noted.evaluated.environment
        for baseline in ["", *noted.evaluated.baselines]:
            path = groups_path(folder, baseline)
            if path.is_file():
                found.append(ViewedFile(str(path), run, part, baseline))
    for name in noted.parts:
        found += _of_evaluation(folder / name, run)
    return found


def _title(place: str) -> str:
    """Returns what a place is called on the page; a URL without its password."""
    if "://" in place:
        scheme, _, rest = place.partition("?")[0].partition("://")
        return f"{scheme}://{rest.rpartition('@')[2]}"
    return "/".join(Path(os.path.abspath(place)).parts[-2:])  # noqa: PTH100 - see `_name`


def _name(place: str) -> str:
    path = Path(os.path.abspath(place))  # noqa: PTH100 - `resolve` would follow links
    name = path.name
    for ending in ENDINGS:
        name = name.removesuffix(ending)
    return name or "run"


def _distinct(names: Sequence[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        number, unique = 2, name
        while unique in found:
            unique, number = f"{name}-{number}", number + 1
        found.append(unique)
    return found


_MOST_BYTES: Final = 4 << 20
_POLL_SECONDS: Final = 2.0
_ENDING: Final = ".failures.jsonl"
_ENVIRONMENT: Final = re.compile(r"(.+)-(?:train|validation|test)-\d")
"""The beginning of a group's id."""


class _Line(msgspec.Struct):
    event: str


class FailureFiles:
    def __init__(self, viewed: Viewed) -> None:
        self._viewed = viewed
        self._read: dict[Path, int] = {}
        self.log = FailureLog()

    @property
    def are_there(self) -> bool:
        return self.log.number > 0

    async def read_new(self) -> None:
        for event in await asyncio.to_thread(lambda: list(self._events())):
            found = _ENVIRONMENT.match(event.group_id)
            self.log.observer(found[1] if found else "")(event)

    async def follow(self, feed: Feed) -> None:
        """Tells watchers of what is appended, until cancelled."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            seen = self.log.number
            await self.read_new()
            self.log.tell(feed, seen)

    def _events(self) -> Iterator[RolloutFailed | GroupDropped]:
        for path in self._paths():
            try:
                size = path.stat().st_size
                before = self._read.get(path, max(0, size - _MOST_BYTES))
                if size < before:  # it was begun anew
                    before = 0
                with path.open("rb") as file:
                    file.seek(before)
                    data = file.read(_MOST_BYTES)
            except OSError:
                continue
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = before + len(whole)
            for line in whole.splitlines():
                yield from _event(line)

    def _paths(self) -> Iterator[Path]:
        for place in map(Path, self._viewed.places):
            if place.is_dir():
                yield from sorted(place.rglob(f"*{_ENDING}"))
            elif (path := failures_path(place)).is_file():
                yield path


def _event(line: bytes) -> Iterator[RolloutFailed | GroupDropped]:
    """Yields the event of a line; none of a line that was cut off, or of another kind."""
    try:
        kind = msgspec.json.decode(line, type=_Line).event
        if kind == "group_dropped":
            yield msgspec.json.decode(line, type=GroupDropped)
        elif kind == "rollout_failed":
            facts = msgspec.json.decode(line, type=dict[str, Any])
            yield msgspec.convert({**facts, "failure": facts}, RolloutFailed)
    except msgspec.DecodeError:
        return
