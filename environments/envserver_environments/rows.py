"""Rows of data sets for the shipped environments: a sample, files or the hub, in an order that
depends on the seed and the split only."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import json
import random
import re
import shutil
import string
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from envserver_environments.demonstrations import table_beside
from envserver_records.tasks import Json
from pydantic import BeforeValidator

from envserver import ConfigError, Environment, InputError, Split, Task
from envserver.rows.columns import RowCounts, took, unreported
from envserver.rows.sources import Rows, Source, on_the_hub, streamed

# An environment has one table of roles and of the names that published sets give them. The row's
# own fields decide, never the name of a set. A name with dots reaches into objects and lists
# (`reward_model.ground_truth`, `choices.text`); a role's first name that has a value counts.

Table = Mapping[str, tuple[str, ...]]
FIELDS_NAMED = 20
_APART = re.compile(r"""(['"])\s+(['"])""")


def roles_of(row: Json, table: Table, columns: Mapping[str, str]) -> Json:
    """Returns the row's values by role; `columns` are the user's names for roles. A role without a
    value is missing."""
    for role, name in columns.items():
        if role not in table:
            raise InputError(f"There is no role {role!r} here.", hint=f"Roles: {', '.join(table)}.")
        if value_at(row, name) is None:
            raise InputError(f"The row has no field {name!r} ({fields_of(row)}).")
    found = {
        role: _first(row, (columns[role],) if role in columns else names)
        for role, names in table.items()
    }
    named = {role: pair for role, pair in found.items() if pair is not None}
    _, solution = named.get("solution", ("", ""))
    took([f"{role}: {name}" for role, (name, _) in named.items()], str(solution))
    return {role: value for role, (_, value) in named.items()}


def spelled(row: Json) -> Json:
    """The row with "yes" and "no" for booleans, where these may be answers."""
    return {
        name: text_of(value) if isinstance(value, bool) else value for name, value in row.items()
    }


def missing(row: Json, roles: Iterable[str]) -> InputError:
    wanted = list(roles)
    return InputError(
        f"No known field of the row has its {' or '.join(wanted)} ({fields_of(row)}): name it by"
        f""" --env.columns '{{"{wanted[0]}": "FIELD"}}'."""
    )


def fields_of(row: Mapping[str, Any]) -> str:
    names = [
        f"{name}{' (empty)' if value_at(row, name) is None else ''}"
        for name in list(row)[:FIELDS_NAMED]
    ]
    return f"its fields: {', '.join(names) or 'none'}{', ...' if len(row) > FIELDS_NAMED else ''}"


def value_at(row: Any, path: str) -> Any:
    """The value at a path such as `answer.value`, None where it is missing or empty. Of lists, also
    nested ones, the values of all objects are listed."""
    if isinstance(row, Mapping) and path in row:
        value = row[path]
        value = value.tolist() if hasattr(value, "tolist") else value  # numpy's
        is_blank = isinstance(value, str) and not value.strip()
        return None if is_blank or value in ([], {}) or value != value else value
    name, _, rest = path.partition(".")
    if not rest:
        return None
    inner = decoded(row.get(name)) if isinstance(row, Mapping) else None
    if isinstance(inner, list):
        parts = [part for item in inner for part in (item if isinstance(item, list) else [item])]
        values = [value_at(part, rest) for part in parts]
        return values if values and all(value is not None for value in values) else None
    return value_at(inner, rest)


def decoded(value: Any) -> Any:
    """Parses text that holds a JSON or Python list or object; returns any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    listed = _APART.sub(r"\1,\2", value.strip())
    for parse, text in ((json.loads, value), (ast.literal_eval, listed)):
        with contextlib.suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return parse(text)
    return value


def by_label(options: Any) -> Any:
    value = decoded(options)
    by_letter: dict[str, Any] = {}
    for option in value if isinstance(value, list) else ():
        match [*option.items()] if isinstance(option, Mapping) else [option]:
            case [[label, text]] if re.fullmatch("[A-Za-z]", str(label)):
                by_letter[label] = text
            case _:
                return value
    return by_letter or value


def last_message(value: Any, *roles: str) -> Any:
    """Returns the last message of the user (or of `roles`); any other value is unchanged."""
    messages = decoded(value)
    if not isinstance(messages, list) or not all(
        isinstance(message, Mapping) for message in messages
    ):
        return value
    said = [
        message.get("content", message.get("value"))
        for message in messages
        if message.get("role", message.get("from")) in (roles or ("user", "human"))
    ][-1:]
    if said and isinstance(said[0], list):  # in parts
        return "".join(str(part.get("text", "")) for part in said[0] if isinstance(part, Mapping))
    return said[0] if said else None


def text_of(value: Any) -> str:
    """A text or a number as text, a boolean as yes or no; "" for anything else, also NaN."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value).strip() if isinstance(value, str | int | float) and value == value else ""


def objects_of(value: Any) -> list[Json]:
    """The objects of a list, or of a table as columns: `{"title": [...], "text": [...]}`."""
    value = decoded(value)
    if isinstance(value, Mapping):
        if not value or not all(isinstance(column, list) for column in value.values()):
            return [dict(value)]
        return [
            dict(zip(value, cells, strict=True)) for cells in zip(*value.values(), strict=False)
        ]
    several = value if isinstance(value, list) else ()
    return [dict(item) for item in several if isinstance(item, Mapping)]


def rows_within(row: Json, path: str) -> list[Json]:
    """The rows that a row holds at `path` (`paragraphs.qas`), each with the fields around it; else
    the row."""
    name, _, rest = path.partition(".")
    inner = objects_of(row[name]) if isinstance(row.get(name), list | dict) else []
    if not inner or (rest and not any(rest in item for item in inner)):
        return [dict(row)]
    around = {key: value for key, value in row.items() if key != name}
    parts = [{**around, **item} for item in inner]
    return [inner_row for part in parts for inner_row in rows_within(part, rest)] if rest else parts


def _first(row: Json, names: Iterable[str]) -> tuple[str, Any] | None:
    values = ((name, value_at(row, name)) for name in names)
    return next((pair for pair in values if not isinstance(pair[1], bool | None)), None)


Row = dict[str, Any]
FirstOption = Callable[[], int]
"""Returns the number of the first option, 0 or 1, where an answer is the number of an option."""
IDS = (
    *("id", "_id", "ID", "qid", "question_id", "task_id", "unique_id", "problem_id", "uuid"),
    *("query_id", "question_idx", "q_uid"),
)
ROWS_ASKED = 500
"""Rows of a file that are read to find whether it counts options from 1, and what its ids are."""


class RowsConfig(Environment.Config):
    """Where an environment's rows are, and what their fields mean."""

    data_path: Path | None = None
    """Rows: a file (.jsonl, .json, .csv, .tsv, .parquet, .arrow, also .gz or .zst), a folder
    with splits, a glob, or hub:owner/name."""
    columns: dict[str, str] = {}
    """Names of the rows' fields by their role, if they are not recognised: '{"question": "input",
    "answer": "target"}'. The error of a row names what is missing."""


class OptionRowsConfig(RowsConfig):
    """Rows whose answers may be options."""

    first_option: Literal[0, 1] | None = None
    """Number of the first option in rows whose answer is the number of an option; unset: 1 if
    an answer of the file is the number of its options and none is 0."""


class NumberedRow(NamedTuple):
    """A row of a file or data set."""

    number: int
    row: Row | None  # None where it cannot be read; `problem` says why
    place: str  # where a person finds it: `train.jsonl:12`
    problem: str = ""
    part: int = 0  # which of several questions in the row, from 1
    id: str = ""  # the row's own id, "" if it has none or another row had it before

    def task_id(self, name: str) -> str:
        if self.part:
            return f"{name}-{self.number}.{self.part}"
        return self.id or f"{name}-{self.number}"

    def parts(self, split: Callable[[Row], list[Row]]) -> list[NumberedRow]:
        rows = split(self.row) if self.row is not None else []
        if len(rows) < 2:
            return [self._replace(row=rows[0]) if rows else self]
        return [self._replace(row=row, part=part) for part, row in enumerate(rows, start=1)]


def name_of(data_set: str, path: Path | None) -> str:
    """The name of the rows in use: "rows" where a path is given and no data set is named."""
    return "rows" if path is not None and data_set == "sample" else data_set


def first_option(
    setting: int | None,
    path: Path | None,
    split: Split,
    read: Callable[[Row, FirstOption], object],
    parts: Callable[[Row], list[Row]] = lambda row: [row],
) -> FirstOption:
    """The number of the first option: as set, else 1 if in the file at `path` the answer of some
    row is the number of its options, and that of none is 0. `read` raises InputError for an answer
    that is none of the row's options; `parts`: the questions of a row."""

    def fits(row: Row, first: int) -> bool:
        try:
            for part in parts(row):
                read(part, lambda: first)
        except InputError:
            return False
        return True

    @functools.cache
    def first() -> int:
        if setting is not None or path is None:
            return setting or 0
        rows = Source(str(path)).open(split)
        ends = False
        with unreported():
            for number in random.Random(0).sample(range(rows.count), min(rows.count, ROWS_ASKED)):
                with suppress(InputError):  # the reader of rows reports what cannot be read
                    row = rows.read(number)
                    if fits(row, 0) and not fits(row, 1):
                        return 0
                    ends = ends or (fits(row, 1) and not fits(row, 0))
        return int(ends)

    return first


def id_of(row: Row) -> str:
    text = json.dumps(row, sort_keys=True, ensure_ascii=True, default=str)
    return f"row-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class Hub:
    """A data set on the hub."""

    path: str
    splits: dict[Split, str]  # this project's split -> its own; a missing one does not exist
    configs: tuple[str | None, ...] = (None,)  # read one after the other; None: it has none
    streaming: bool = False  # too large to download before the first row
    arguments: Json = field(default_factory=dict)  # for `datasets.load_dataset`


def published(module: str) -> tuple[Table, dict[str, Hub]]:
    """The roles and the sets on the hub that `published.toml` beside a module names."""
    held = table_beside(module, "published")
    hubs = {
        name: Hub(**{**facts, "configs": tuple(facts.get("configs", [None]))})
        for name, facts in held.get("hubs", {}).items()
    }
    return {role: tuple(names) for role, names in held["roles"].items()}, hubs


@dataclass(frozen=True)
class Division:
    """Divides a data set without splits into three, by shares of a shuffle, rounded down."""

    seed: int = 7  # not the run's, which changes the order only
    validation: float = 0.10
    test: float = 0.05

    def numbers(self, count: int, split: Split) -> array[int]:
        order = array("Q", range(count))
        random.Random(self.seed).shuffle(order)
        validation, test = int(count * self.validation), int(count * self.test)
        train = count - validation - test
        match split:
            case "train":
                return order[:train]
            case "validation":
                return order[train : train + validation]
            case "test":
                return order[train + validation :]


@dataclass(frozen=True)
class DataSets:
    """The data sets of an environment."""

    sample: Path  # the shipped rows, all in every split
    hubs: Mapping[str, Hub]
    divisions: Mapping[str, Division] = field(default_factory=dict)  # of those without splits

    def rows(self, name: str, path: Path | None, split: Split, seed: int) -> Iterator[NumberedRow]:
        division = self.divisions.get(name)
        if path is not None and name != "sample":
            return file_rows(path, split, seed, division)
        if name == "sample":
            source = Source(str(path or self.sample)).open(split)
            kind = "file" if path else "sample"
            return _with_ids(_shuffled(source, f"{kind}-{seed}-{split}", split, None), source)
        if name not in self.hubs:
            raise ConfigError(f"The rows of {name!r} come from a file.", hint="Set data_path.")
        return hub_rows(self.hubs[name], split, seed, division)


def file_rows(
    path: Path, split: Split, seed: int, division: Division | None = None
) -> Iterator[NumberedRow]:
    """Rows of what `Source` reads; `division` divides rows that have no splits, else every split
    has all."""
    # As a path, `hub:owner/name` is still what the user wrote, but for an empty part.
    rows = Source(str(path)).open(split)
    return _shuffled(rows, f"file-{seed}-{split}", split, None if rows.has_splits else division)


def hub_rows(
    hub: Hub, split: Split, seed: int, division: Division | None = None
) -> Iterator[NumberedRow]:
    """Rows of a data set on the hub; `division` divides its split."""
    if split not in hub.splits:
        raise ConfigError(
            f"{hub.path} has no split {split!r}.", hint=f"It has: {', '.join(hub.splits)}."
        )
    return _hub_rows(hub, split, seed, division)


def _with_ids(rows: Iterator[NumberedRow], source: Rows) -> Iterator[NumberedRow]:
    name, seen = _id_field(source), {""}
    for numbered in rows:
        own = text_of((numbered.row or {}).get(name))
        yield numbered._replace(id="" if own in seen else own)
        seen.add(own)


def _id_field(source: Rows) -> str:
    """The field of IDS that differs in most of the rows that are looked at, else ""."""
    looked_at: list[Row] = []
    for number in random.Random(0).sample(range(source.count), min(source.count, ROWS_ASKED)):
        with unreported(), suppress(InputError):  # a row that cannot be read is reported elsewhere
            looked_at.append(source.read(number))
    ids = {name: {text_of(row.get(name)) for row in looked_at} - {""} for name in IDS}
    best = max(IDS, key=lambda name: len(ids[name]))
    return best if 2 * len(ids[best]) >= len(looked_at) else ""


def _hub_rows(
    hub: Hub, split: Split, seed: int, division: Division | None
) -> Iterator[NumberedRow]:
    named, first = hub.splits[split], 0
    for config in hub.configs:
        if hub.streaming:
            for number, row in enumerate(streamed(hub.path, config, named, seed)):
                yield NumberedRow(number, row, f"{hub.path}, split {named}: row {number}")
            continue
        rows = on_the_hub(hub.path, config, named, **hub.arguments)
        for numbered in _shuffled(rows, f"hub-{seed}-{named}-{config}", split, division):
            yield numbered._replace(number=first + numbered.number)
        first += rows.count


def _shuffled(
    rows: Rows, seed: str, split: Split, division: Division | None
) -> Iterator[NumberedRow]:
    numbers = division.numbers(rows.count, split) if division else array("Q", range(rows.count))
    random.Random(seed).shuffle(numbers)
    for number in numbers:
        place = rows.place(number)
        try:
            row = rows.read(number)
            took(row)
            yield NumberedRow(number, row, place)
        except InputError as error:
            yield NumberedRow(number, None, place, error.message)


T = TypeVar("T")


def listed(value: T | list[T]) -> list[T]:
    """The different items of a list, or the only one."""
    return list(dict.fromkeys(value)) if isinstance(value, list) else [value]


SEVERAL = BeforeValidator(
    lambda value: value.split(",") if isinstance(value, str) and "," in value else value
)
"""Takes the items of a list also in one text, with commas."""


class DataEnvironment(Environment):
    """An environment of rows: counts what became of each, and can write its built-in files."""

    sample_files: ClassVar[Mapping[str, str]] = {}

    def __init__(self, config: Environment.Config | None = None) -> None:
        super().__init__(config)
        self.rows = RowCounts()

    @classmethod
    def write_sample(cls, folder: Path) -> Mapping[str, Any]:
        owner = next(kind for kind in cls.__mro__ if "sample_files" in vars(kind))
        return copied(Path(inspect.getfile(owner)).parent / "data", folder, cls.sample_files)


def made(
    rows: Iterable[NumberedRow], make: Callable[[Row, NumberedRow], T]
) -> Iterator[tuple[str, T | str]]:
    """Yields the place of each row, and what `make` returns, or the message where it raises
    InputError or the row cannot be read."""
    for numbered in rows:
        try:
            if numbered.row is None:
                raise InputError(numbered.problem)
            result: T | str = make(numbered.row, numbered)
        except InputError as error:
            result = error.message
        yield numbered.place, result


def mixed(streams: Iterable[Iterator[Task]], seed: str) -> Iterator[Task]:
    """Draws from all streams with equal chances until each has ended."""
    rng, left = random.Random(seed), list(streams)
    while left:
        stream = rng.choice(left)
        task = next(stream, None)
        if task is None:
            left.remove(stream)
        else:
            yield task


def copied(data: Path, folder: Path, settings: Mapping[str, str]) -> dict[str, Path]:
    """Copies files and folders of `data` to `folder`; `settings` as in `sample_files`. Returns the
    settings, with the copies' paths."""
    copies = {name: folder / path for name, path in settings.items()}
    for name, path in settings.items():
        source = data / path
        if source.is_dir():
            shutil.copytree(source, copies[name], dirs_exist_ok=True)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copies[name])
    return copies


MAX_OPTIONS = 26
_LABEL = re.compile(r"\s*(?:option\s+)?\(?([a-z])\s*[).:]+\s*(\S.*)", re.DOTALL | re.IGNORECASE)
_NUMBER = re.compile(r"\s*\(?(\d{1,2})[).:]+\s+(\S.*)", re.DOTALL)
_LETTER = re.compile(r"(?:option\s+)?\(?([a-z])\s*[).:]*", re.IGNORECASE)
_INLINE = re.compile(r"(?:^|(?<=\s))(?:\([A-Za-z]\)|[A-Z][).:]|[a-z]\))\s+")
_HEADING = re.compile(r"(?:options|choices|candidates)\s*:\s*\Z", re.IGNORECASE)
_EMPTY = ("", "N/A")
"""Values of option columns that mean that there is no such option."""


def options_of(raw: Any) -> tuple[list[str], int | None]:
    """Texts of the options, without labels A, B, C ... or 1, 2, 3 ..., and the number of the first
    if shown."""
    raw = by_label(raw) or []
    if isinstance(raw, str):
        raw = split_options(raw)[1] or raw.splitlines()
    if isinstance(raw, dict):
        raw = [raw[name] for name in sorted(raw)]
    while isinstance(raw, list) and raw and text_of(raw[-1]) in _EMPTY:
        raw = raw[:-1]
    if not isinstance(raw, list) or not all(
        isinstance(option, str | int | float) for option in raw
    ):
        raise InputError("This row's options are not a list of texts.")
    options = [str(option).strip() if text_of(option) else "" for option in raw]
    if len(options) == 1 or len(options) > MAX_OPTIONS or not all(options):
        raise InputError("This row's options are too few, too many, or empty.")
    labels = [label for label in map(_LABEL.fullmatch, options) if label]
    if "".join(label[1].upper() for label in labels) == string.ascii_uppercase[: len(options)]:
        return [label[2].strip() for label in labels], None
    labels = [label for label in map(_NUMBER.fullmatch, options) if label]
    for first in (0, 1):
        if options and [int(label[1]) for label in labels] == [*range(first, first + len(options))]:
            return [label[2].strip() for label in labels], first
    return options, None


def split_options(text: str) -> tuple[str, list[str]]:
    """A question and the options "A. red", "(B) blue" that stand behind it, one after the other."""
    marks = list(_INLINE.finditer(text))
    for place in reversed(range(len(marks))):
        pairs = zip(marks[place:], string.ascii_uppercase, strict=False)
        run = [mark for mark, _ in takewhile(lambda pair: pair[1] in pair[0][0].upper(), pairs)]
        if len(run) < 2:
            continue
        ends = [*(mark.start() for mark in run[1:]), len(text)]
        options = [text[mark.end() : end].strip() for mark, end in zip(run, ends, strict=True)]
        options[-1], _, rest = options[-1].partition("\n")
        stem = _HEADING.sub("", text[: run[0].start()])
        return "\n".join(filter(None, (stem.strip(), rest.strip()))), options
    return text, []


def option_place(
    answer: Any,
    options: list[str],
    *,
    means: Literal["index", "text"] | None = None,
    first: FirstOption = lambda: 0,
) -> int | None:
    """Returns the index of the option that a data set's answer means: an index, a letter, or a
    text, alone or both ("(B)", "B. red"); `means` decides where an answer may be index or text."""
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    text = text_of(answer)
    number = re.fullmatch(r"(\d{1,2})(?:\.0)?", text)
    letter = _LETTER.fullmatch(text) or _LABEL.fullmatch(text)
    plain, known = _plain(text), [_plain(option) for option in options]
    by_letter = ord(letter[1].upper()) - ord("A") if letter else -1
    if letter and letter.re is _LABEL and known[by_letter : by_letter + 1] != [_plain(letter[2])]:
        by_letter = -1
    places = {
        "index": int(number[1]) - first() if number else -1,
        "letter": by_letter,
        "text": known.index(plain) if known.count(plain) == 1 else -1,
    }
    valid = {kind: place for kind, place in places.items() if 0 <= place < len(options)}
    if not isinstance(answer, str) or (means == "index" and number):
        return valid.get("index")
    if means == "text" and means in valid:
        return valid[means]
    if len(set(valid.values())) > 1:
        raise InputError(
            f"The answer {text!r} is the text of one option and the {min(valid)} of another:"
            """ --env.columns '{"index": "FIELD"}' names the place of the right one."""
        )
    return next(iter(valid.values()), None)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".")
