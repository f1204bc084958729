"""Finds the files of a split: which files of a folder hold rows, of which split, in which order.

In: a folder as the hub, `save_to_disk` of the library datasets, or a person lays it out. Out: the
files of one split. The words for splits, and that a word counts between characters that are no
letters, are those of the hub's documentation ("Structure your repository").
"""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from envserver_records.errors import ConfigError, NotFoundError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
PACKED = (".gz", ".zst")
_SPLITS = {
    **dict.fromkeys(("train", "training", "trainset"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "valset", "devset"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation", "testset"), "test"),
}
_SPLIT = re.compile(rf"(?<![a-z])({'|'.join(sorted(_SPLITS, key=len, reverse=True))})(?![a-z])")
_ABOUT = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_DEEPEST = 4
_logger = logging.getLogger(__name__)


def kind_of(path: PurePath | str) -> str | None:
    """The suffix that says how a file holds its rows (".jsonl" of "a.jsonl.gz"); None: no rows."""
    path = PurePath(str(path).lower())
    path = path.with_suffix("") if path.suffix in PACKED else path
    return path.suffix if path.suffix in SUFFIXES else None


def natural(paths: Iterable[Path]) -> list[Path]:
    """Paths in the order of people: `test2` before `test10`."""

    def key(path: Path) -> list[tuple[int, str]]:
        parts = re.split(r"([0-9]+)", _without_suffix(str(path)))
        return [(int(part) if number % 2 else 0, part) for number, part in enumerate(parts)]

    return sorted(paths, key=key)


def same_split(split: str, names: Iterable[str]) -> list[str]:
    """Those of `names` that mean `split`."""
    wanted = _SPLITS.get(split, split)
    return [name for name in names if _SPLITS.get(name.lower(), name) == wanted]


def are_splits(names: Iterable[str]) -> bool:
    """Returns whether all names are those of splits."""
    return all(name.lower() in _SPLITS for name in names)


@dataclass
class Layout:
    """The files of a folder.

    Args:
        splits: files by configuration ("": none) and split ("": rows of no split).
    """

    folder: Path
    splits: dict[str, dict[str, list[Path]]] = field(default_factory=dict)

    @property
    def has_splits(self) -> bool:
        """Whether each split has files of its own."""
        return any(name for splits in self.splits.values() for name in splits)

    def files(self, split: str, subset: str | None = None) -> list[Path]:
        """The files of `split`, in order; all files where the folder has no splits.

        Args:
            split: a name of a split, or of files: "verified" for `verified-00000-of-00002.parquet`.
            subset: the configuration; None: the only one, or that of no folder of its own.

        Raises:
            NotFoundError: there is no such split or configuration; the message names those there.
            ConfigError: there are several configurations and none is chosen.
        """
        splits = self._configuration(subset)
        same = same_split(split, splits)
        every = [path for paths in splits.values() for path in paths]
        found = splits.get(split) or [path for name in same for path in splits[name]]
        found = [path for path in every if _set_of(path) == split] or found
        if not found and splits.keys() == {""}:
            found = every
        if not found:
            there = [name for name in splits if name] + [path.name for path in splits.get("", [])]
            raise NotFoundError(
                f"{self.folder} has no rows of the split {split!r}.",
                hint=f"It has {', '.join(there) or 'no rows'}: choose by --env.split, or name one.",
            )
        return self._of_one_set(found, split)

    def _of_one_set(self, found: list[Path], split: str) -> list[Path]:
        """The files of one set, in order, each once; a plain file comes before a packed one."""
        # Names of files tell sets apart, but not in a folder that is a split itself.
        named = [path for path in found if _split_in(path.name.lower())]
        sets = {_set_of(path) for path in (named if self.has_splits else found)}
        if split in sets:
            found = [path for path in found if _set_of(path) == split]
        elif len(sets) > 1:
            raise ConfigError(
                f"{self.folder} has several sets of {split}: {', '.join(sorted(sets))}.",
                hint="Name one: a file, or a glob.",
            )
        kinds = [kind for kind in SUFFIXES if any(kind_of(path) == kind for path in found)]
        if kinds[1:]:
            _logger.warning("%s: %s is read, %s is not.", self.folder, kinds[0], kinds[1:])
        ordered = natural(path for path in found if kind_of(path) == kinds[0])
        plain_first = sorted(ordered, key=lambda path: path.suffix.lower() in PACKED)
        once = {_without_suffix(str(path)): path for path in reversed(plain_first)}
        return [path for path in ordered if path in once.values()]

    def _configuration(self, subset: str | None) -> dict[str, list[Path]]:
        names = sorted(self.splits)
        if subset is not None and subset in self.splits:
            return self.splits[subset]
        if subset is None and (len(names) == 1 or "" in names):
            return self.splits["" if "" in names else names[0]]
        if not names:
            raise NotFoundError(
                f"{self.folder} has no file of rows ({', '.join(SUFFIXES)}; also .gz, .zst)."
            )
        listed = ", ".join(name for name in names if name)
        if subset is not None:
            raise NotFoundError(f"{self.folder} has no configuration {subset!r}. It has: {listed}.")
        raise ConfigError(
            f"{self.folder} has several configurations: {listed}.",
            hint=f"Name the folder of one: {self.folder / names[0]}.",
        )


def layout_of(folder: Path) -> Layout:
    """Reads which files `folder` has."""
    if saved := _saved(folder):
        return Layout(folder, {"": {"": saved}})
    if (folder / "dataset_dict.json").is_file():
        parts = {one.parent.name: _saved(one.parent) for one in folder.glob("*/state.json")}
        return Layout(folder, {"": parts})
    found: dict[str, dict[str, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for path in _files_below(folder, _DEEPEST):
        split, configuration = _place_of(path.relative_to(folder))
        found[configuration][split].append(path)
    named = {name: splits for name, splits in found.items() if splits.keys() != {""}}
    if not named:  # a folder of shards of one set
        return Layout(folder, {name: dict(splits) for name, splits in found.items()})
    return Layout(folder, {name: dict(splits) for name, splits in named.items()})


def _saved(folder: Path) -> list[Path]:
    """The shards of a data set that `save_to_disk` wrote; none where something else is."""
    try:
        state = json.loads((folder / "state.json").read_bytes())
        return [folder / one["filename"] for one in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _files_below(folder: Path, depth: int) -> Iterator[Path]:
    for path in natural(folder.iterdir()):
        if path.name.startswith((".", "_")) or path.name in _ABOUT:
            continue
        if path.is_dir() and depth > 1:
            yield from _files_below(path, depth - 1)
        elif kind_of(path):
            yield path


def _place_of(path: Path) -> tuple[str, str]:
    """The split and the configuration of a file, by its name and the folders above it."""
    folders = [name for name in path.parts[:-1] if name != "data"]
    if (split := _split_in(path.name.lower())) is not None:
        return split, "/".join(folders)
    for place in reversed(range(len(folders))):
        if (split := _split_in(folders[place].lower())) is not None:
            return split, "/".join(folders[:place] + folders[place + 1 :])
    return "", "/".join(folders)


def _split_in(name: str) -> str | None:
    """The split that the last such word of a name says."""
    found = _SPLIT.findall(_without_suffix(name))
    return _SPLITS[found[-1]] if found else None


def _set_of(path: Path) -> str:
    """A file's name without what numbers its shards: "train" of `train-00000-of-00002.parquet`."""
    return re.sub(r"[-_.]?\d+(?:-of-\d+)?$", "", _without_suffix(path.name))


def _without_suffix(name: str) -> str:
    for suffix in (*PACKED, *SUFFIXES):
        if name.lower().endswith(suffix):
            name = name[: -len(suffix)]
    return name
