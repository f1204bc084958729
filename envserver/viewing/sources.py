"""What is looked at: files, folders, evaluations, a store or a server, by what the user named.

In: the arguments of `envserver view`. Out: `Viewed`. Nothing is read but the names of files, and
their first bytes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
from envserver_records.errors import ConfigError, InputError, NotFoundError

from ..evaluation.folders import RunFile, groups_path, read_run_file
from ..export.stored_files import ENDINGS, files_of
from ..export.stored_sources import DATABASES, SERVERS, is_sqlite

Kind = Literal["file", "folder", "store", "server", "evaluation", "comparison"]

_NOT_DOCUMENTS: Final = frozenset(
    {"run.json", "report.json", "comparison.json", "index.json", "manifest.json", "summary.json"}
)


class ViewedFile(msgspec.Struct, frozen=True):
    """A file of groups or documents.

    Args:
        run: name of its run among several; "": the only one.
        part: name of the evaluation's part; baseline: of the baseline that it holds.
    """

    path: str
    run: str = ""
    part: str = ""
    baseline: str = ""


class Viewed(msgspec.Struct, frozen=True):
    """What is looked at.

    Args:
        title: what it is called, without passwords.
        places: as the user named them.
        runs: names of the runs, one for each place.
    """

    kind: Kind
    title: str
    places: list[str]
    runs: list[str] = []

    @property
    def is_on_disk(self) -> bool:
        """Whether it consists of files that an index is made of."""
        return self.kind not in ("store", "server")

    def files(self) -> list[ViewedFile]:
        """Returns the files that there are now, in their order."""
        found: list[ViewedFile] = []
        for place, run in zip(self.places, self.runs, strict=True):
            found += _files(place, run if len(self.runs) > 1 else "")
        for one in found:
            _check_name(one.path)
        return found


def viewed(places: Sequence[str]) -> Viewed:
    """Returns what `places` name.
    Raises ConfigError: a place is a pipe, or there are several, and one is a server or a store.
    """
    if pipes := [place for place in places if place == "-" or Path(place).is_fifo()]:
        raise ConfigError(f"{pipes[0]} is a pipe, which cannot be looked at twice.")
    titles = [_title(place) for place in places]
    alone = [kind for place in places if (kind := _alone(place))]
    if alone and len(places) > 1:
        raise ConfigError(
            f"A {alone[0]} is looked at alone.",
            hint="Several places are files or folders of runs that are compared.",
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
    """Returns whether `folder` was written by `evaluate`."""
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
    found = [one for one in sorted(folder.iterdir()) if one.is_file() and is_sqlite(one)]
    found = [one for one in found if not one.name.endswith(".index")]
    lines = any(one.name.endswith(ENDINGS) for one in folder.iterdir())
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
    """Returns the files of single documents below a folder."""
    if not folder.is_dir():
        return []
    found = sorted(one for one in folder.rglob("*.json") if not one.name.startswith("."))
    return [one for one in found if one.name.lower() not in _NOT_DOCUMENTS and one.is_file()]


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
    """Returns the names, the second of two equal ones with a number."""
    found: list[str] = []
    for name in names:
        number, unique = 2, name
        while unique in found:
            unique, number = f"{name}-{number}", number + 1
        found.append(unique)
    return found
