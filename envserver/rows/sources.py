"""Reads rows by number, wherever they are, for every environment:
    a file     .jsonl (.ndjson), .json, .csv, .tsv, .parquet or .arrow, each also .gz and .zst
    a folder   as `layout_of` reads it, several files of a split one after the other
    a glob     "data/part-*.jsonl": all files that match, as one
    the hub    hub:owner/name[/configuration][@revision]
    a list
JSONL is read line by line, at eight bytes of memory a line, what is packed is unpacked into a
temporary file; CSV and JSON are held in memory.
"""

from __future__ import annotations

import bisect
import csv
import functools
import glob
import gzip
import importlib
import itertools
import json
import logging
import re
import shutil
import tempfile
import zlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any, NoReturn

from envserver_records.errors import ConfigError, InputError, NotFoundError
from envserver_records.extras import install_command

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
    wanted = _SPLITS.get(split, split)
    return [name for name in names if _SPLITS.get(name.lower(), name) == wanted]


def are_splits(names: Iterable[str]) -> bool:
    return all(name.lower() in _SPLITS for name in names)


@dataclass
class Layout:
    """The files of a folder, by configuration ("": none) and split ("": rows of no split)."""

    folder: Path
    splits: dict[str, dict[str, list[Path]]] = field(default_factory=dict)

    @property
    def has_splits(self) -> bool:
        return any(name for splits in self.splits.values() for name in splits)

    def files(self, split: str, subset: str | None = None) -> list[Path]:
        """The files of `split`, in order; all files where the folder has no splits.

        Args:
            split: a name of a split, or of files: "verified" for `verified-00000-of-00002.parquet`.
            subset: the configuration; None: the only one, or that of no folder of its own.
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
    if saved := _saved(folder):
        return Layout(folder, {"": {"": saved}})
    if (folder / "dataset_dict.json").is_file():
        parts = {state.parent.name: _saved(state.parent) for state in folder.glob("*/state.json")}
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
        return [folder / file["filename"] for file in state["_data_files"]]
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


Row = dict[str, Any]
HUB = "hub:"
_HUB_NAME = re.compile(
    r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?:/(?P<subset>[^/@]+))?(?:@(?P<revision>.+))?"
)
SHUFFLE_BUFFER_ROWS = 10_000
"""Rows among which a streamed data set is shuffled."""
_LONGEST_REASON = 200
_LONGEST_VALUE = 1 << 30
"""Characters of one value of a table: Python's own limit is 131,072."""


@dataclass(frozen=True)
class Rows:
    """The rows of one split: their number, and functions of the number of one, from 0."""

    count: int
    place: Callable[[int], str]
    read: Callable[[int], Row]
    has_splits: bool = False


@dataclass(frozen=True)
class Source:
    """Where rows are: in `data` (a file, a folder, a glob, or a name on the hub), or the rows
    themselves. `subset`: the configuration; `splits`: names of its splits by ours, where they
    differ."""

    data: str = ""
    subset: str | None = None
    splits: Mapping[str, str] = field(default_factory=dict)
    listed: Sequence[Mapping[str, Any]] | None = None

    def open(self, split: str) -> Rows:
        if self.listed is not None:
            return _listed(self.listed)
        name = self.splits.get(split, split)
        if self.data.startswith(HUB):
            return _hub(self.data.removeprefix(HUB), self.subset, name)
        path = Path(self.data)
        if path.is_dir():
            layout = layout_of(path)
            rows = _joined([_file(file, name) for file in layout.files(name, self.subset)])
            return replace(rows, has_splits=bool(self.splits) or layout.has_splits)
        if not is_glob(self.data):
            return _file(path, name)
        found = natural(map(Path, glob.glob(self.data, recursive=True)))  # noqa: PTH207 - Path takes no absolute one
        if not found:
            raise NotFoundError(f"No file matches {self.data!r}.")
        return _joined([_file(path, name) for path in found])


def every_row(path: Path) -> Iterator[Row]:
    rows = Source(str(path)).open("train")
    for number in range(rows.count):
        try:
            yield rows.read(number)
        except InputError as error:
            raise InputError(f"{rows.place(number)}: {error.message}.") from error


def is_data(reference: str) -> bool:
    """Returns whether `reference` names rows: a file or glob by its suffix, a folder with splits,
    the hub."""
    if reference.startswith(HUB) or kind_of(reference):
        return True
    path = Path(reference)
    return path.is_dir() and not any(path.glob("*.py")) and layout_of(path).has_splits


def is_glob(data: str) -> bool:
    return glob.has_magic(data) and not Path(data).exists()


def _joined(parts: Sequence[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    starts = [0, *itertools.accumulate(part.count for part in parts)]

    def found(number: int) -> tuple[Rows, int]:
        part = bisect.bisect_right(starts, number) - 1
        return parts[part], number - starts[part]

    def place(number: int) -> str:
        rows, own = found(number)
        return rows.place(own)

    def read(number: int) -> Row:
        rows, own = found(number)
        return rows.read(own)

    return Rows(starts[-1], place, read)


def _file(path: Path, split: str) -> Rows:
    if not path.is_file():
        raise NotFoundError(f"There is no data file {str(path)!r}.")
    readers: dict[str | None, Callable[[Path, str], Rows]] = {
        **dict.fromkeys((".jsonl", ".ndjson"), _json_lines),
        **dict.fromkeys((".csv", ".tsv"), _csv),
        ".json": functools.partial(_json, split=split),
        ".parquet": _parquet,
        ".arrow": _arrow,
    }
    if (kind := kind_of(path)) is None:
        raise ConfigError(f"{path} is not one of {', '.join(SUFFIXES)}; also .gz and .zst.")
    if path.suffix.lower() not in PACKED:
        return readers[kind](path, str(path))
    unpacked = _unpacked(path, kind)
    rows = readers[kind](Path(unpacked.name), str(path))
    # Whoever reads rows holds the file, which goes with the last of them.
    return replace(rows, read=lambda number: (unpacked, rows.read(number))[1])


def _unpacked(path: Path, kind: str) -> Any:
    unpacked = tempfile.NamedTemporaryFile(prefix="envserver-rows-", suffix=kind)  # noqa: SIM115 - rows hold it
    try:
        if path.suffix.lower() == ".gz":
            with gzip.open(path) as packed:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
        else:
            arrow = _library("pyarrow", str(path))
            with arrow.input_stream(str(path), compression="zstd") as packed:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be unpacked: {error}.") from error
    unpacked.flush()
    return unpacked


def _listed(rows: Sequence[Mapping[str, Any]]) -> Rows:
    return Rows(len(rows), lambda number: f"row {number}", lambda number: _checked(rows[number]))


def _json_lines(path: Path, name: str) -> Rows:
    offsets, lines = array("Q"), array("Q")
    with path.open("rb") as file:
        offset = 0
        for line, text in enumerate(file, 1):
            if text.strip():
                offsets.append(offset)
                lines.append(line)
            offset += len(text)

    def read(number: int) -> Row:
        with path.open("rb") as file:
            file.seek(offsets[number])
            return _checked(_parsed(file.readline()))

    return Rows(len(offsets), lambda number: f"{name}:{lines[number]}", read)


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"it is not JSON: {str(error)[:_LONGEST_REASON]}") from error


def _json(path: Path, name: str, split: str) -> Rows:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        if str(error).startswith("Extra data"):  # lines of JSON, as some call .json
            return _json_lines(path, name)
        raise ConfigError(f"{name}: it is not JSON: {str(error)[:_LONGEST_REASON]}") from error
    is_parted = isinstance(value, dict) and bool(value) and are_splits(value)
    if is_parted:
        wanted = same_split(split, value)
        if not wanted:
            raise NotFoundError(
                f"{name} has no rows of the split {split!r}.", hint=f"It has {', '.join(value)}."
            )
        value = value[wanted[0]]
    if isinstance(value, dict):
        value = _rows_in(value)
    if not isinstance(value, list):
        raise ConfigError(f"{name} holds no list of rows.")
    rows: list[Any] = value
    return Rows(
        len(rows),
        lambda number: f"{name}[{number}]",
        lambda number: _checked(rows[number]),
        has_splits=is_parted,
    )


def _rows_in(value: dict[str, Any]) -> list[Any]:
    """The rows of an object: by their ids, column by column (as pandas writes a table), under some
    key, or the object itself."""
    parts = [part for part in value.values() if isinstance(part, dict)]
    if len(parts) == len(value):
        if all(name.isdigit() for part in parts for name in part):
            columns = zip(*(part.values() for part in parts), strict=False)
            return [dict(zip(value, row, strict=True)) for row in columns]
        return [{"id": name, **part} for name, part in value.items()]
    lists = [part for part in value.values() if isinstance(part, list) and part]
    of_objects = [part for part in lists if all(isinstance(item, dict) for item in part)]
    return max(of_objects, key=len, default=[value])


def _csv(path: Path, name: str) -> Rows:
    delimiter = "\t" if kind_of(name) == ".tsv" else ","
    csv.field_size_limit(_LONGEST_VALUE)
    lines: list[tuple[int, list[str]]] = []
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        before = 0
        try:
            for fields in reader:
                if fields:
                    lines.append((before + 1, fields))
                before = reader.line_num
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"{name}:{before + 1}: it cannot be read: {error}.") from error
    header = lines[0][1] if lines else []
    twice = {name for name in header if header.count(name) > 1}
    if not header or twice:
        what = f"names {', '.join(sorted(twice))} twice" if twice else "is missing"
        raise ConfigError(f"{name}:1: the line with the names of the columns {what}.")
    rows = lines[1:]

    def read(number: int) -> Row:
        fields = rows[number][1]
        if len(fields) != len(header):
            raise InputError(f"it has {len(fields)} values for {len(header)} columns")
        return dict(zip(header, fields, strict=True))

    return Rows(len(rows), lambda number: f"{name}:{rows[number][0]}", read)


def _parquet(path: Path, name: str) -> Rows:
    library = _library("pyarrow.parquet", name)
    return _table(name, lambda: library.read_table(path))


def _arrow(path: Path, name: str) -> Rows:
    """Reads either form of Arrow's files: a stream, as the library datasets writes, or a file."""
    arrow = _library("pyarrow", name)

    def read() -> Any:
        source = arrow.memory_map(str(path))
        try:
            return arrow.ipc.open_stream(source).read_all()
        except arrow.ArrowInvalid:
            return arrow.ipc.open_file(source).read_all()

    return _table(name, read)


def _table(name: str, read: Callable[[], Any]) -> Rows:
    try:
        table = read()
    except Exception as error:  # noqa: BLE001 - the library's, whatever it is
        _unreadable(name, error)
    return Rows(
        table.num_rows,
        lambda number: f"{name}: row {number}",
        lambda number: _checked(table.slice(number, 1).to_pylist()[0]),
    )


def _hub(reference: str, subset: str | None, split: str) -> Rows:
    parts = _HUB_NAME.fullmatch(reference)
    if parts is None:
        raise ConfigError(f"hub:{reference} is not hub:owner/name[/configuration][@revision].")
    return on_the_hub(
        parts["name"], subset or parts["subset"], split=split, revision=parts["revision"]
    )


def on_the_hub(name: str, subset: str | None, split: str, **arguments: Any) -> Rows:
    data = _loaded(name, subset, split, **arguments)
    return Rows(
        len(data),
        lambda number: f"{name}, split {split}: row {number}",
        lambda number: _checked(data[number]),
        has_splits=True,
    )


def streamed(
    name: str, subset: str | None, split: str, shuffle: int | None = None
) -> Iterator[Row]:
    """The rows of a data set on the hub, as they arrive: without numbers. `shuffle`: seed of a
    shuffle among SHUFFLE_BUFFER_ROWS rows; None: in order."""
    data = _loaded(name, subset, split, streaming=True)
    if shuffle is not None:
        data = data.shuffle(seed=shuffle, buffer_size=SHUFFLE_BUFFER_ROWS)
    yield from map(dict, data)


def _loaded(name: str, subset: str | None, split: str, **arguments: Any) -> Any:
    library = _library("datasets", name)
    try:
        return library.load_dataset(name, subset, split=split, **arguments)
    except Exception as error:  # noqa: BLE001 - the library's, whatever it is
        _unreadable(name, error)


def _library(module: str, source: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise ConfigError(
            f"Reading {source} needs the library `{library}`, which cannot be imported: {error}.",
            hint=f"{install_command('data')}, or use a JSONL file.",
        ) from error


def _unreadable(source: str, error: Exception) -> NoReturn:
    reason = f"{type(error).__name__}: {str(error)[:_LONGEST_REASON]}"
    raise ConfigError(
        f"{source} cannot be loaded: {reason}",
        hint="`splits` maps names of splits, `subset` names the configuration of a data set.",
    ) from error


def _checked(value: Any) -> Row:
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        value = {str(place): item for place, item in enumerate(value)}  # Open-Reasoner-Zero's talks
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise InputError("it is not an object with named columns")
    return dict(value)
