"""The data card of an export for the Hugging Face hub: `README.md` in its folder.

It names no path, user or password of this machine; names from the data can neither end the header
nor become markup; unstated facts (the license) stay open.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from envserver_records.tasks import Json

from envserver.export.stored import StoredGroup, StoredRollout
from envserver.version import __version__

from ..exporting.formats import MANIFEST, Format, NamedFile, Row, Writer, Written
from ..exporting.html import RunFacts

CARD = "README.md"
_LOOKED_AT = 1000
"""Rows inspected for the card's list of columns."""
_LONGEST = 100
_BAR = 30
_SIZES = {1_000: "n<1K", 10_000: "1K<n<10K", 100_000: "10K<n<100K", 1_000_000: "100K<n<1M"}
_SPLITS = ("train", "validation", "test")
_ABOUT = {
    "atropos": "One row is a group of rollouts of one task, in the form of Atropos.",
    "messages": "One row is a conversation for supervised fine-tuning, in OpenAI's chat form.",
    "dpo": "One row is a pair of answers to one prompt, the chosen one of a higher reward.",
    "unified": "One file is one rollout as a readable record.",
    "traces": "One file is one rollout as a trace of typed steps.",
    "parquet": "One row is one training row of a rollout: its tokens, which of them were sampled "
    "(`mask`), and their logprobs. `row` counts the rows of a rollout from 0; take `row == 0` for "
    "one row a rollout. Columns that end in `_json` hold JSON text; `messages_json` is null where "
    "`messages` says everything.",
    "html": "Pages for people: open `index.html`.",
}


@dataclass(frozen=True)
class Asked:
    title: str
    sources: Sequence[str]
    filter: Json = field(default_factory=dict)
    against: Sequence[str] = ()
    against_words: int = 0


class WithCard(Format):
    """Adds a card to the folder of another format."""

    def __init__(self, format: Format, settings: Asked) -> None:
        super().__init__(format.options)
        self.name, self.suffix = format.name, format.suffix
        self._format = format
        self._asked = settings
        self._facts = RunFacts()

    def rows(self, group: StoredGroup, kept: Sequence[StoredRollout]) -> Iterator[Row]:
        self._facts.add(group, kept)
        yield from self._format.rows(group, kept)

    def writer(self, folder: Path, shard_rows: int | None) -> Writer:
        self._folder = folder
        self._writer = self._format.writer(folder, shard_rows)
        self._columns: dict[str, set[str]] = {}
        self._rows = 0
        return self

    def put(self, row: Row) -> None:
        self._rows += 1
        if self._rows <= _LOOKED_AT and not isinstance(row, NamedFile):
            for name, value in row.items():
                self._columns.setdefault(name, set()).add(_kind(value))
        self._writer.put(row)

    def close(self) -> list[Written]:
        written = self._writer.close()
        columns = {name: " or ".join(sorted(kinds)) for name, kinds in self._columns.items()}
        if self._format.name == "parquet":
            from ..exporting.parquet import schema

            columns = {column.name: str(column.type) for column in schema()}
        text = card(
            self._facts,
            self._asked,
            format=self._format.name,
            columns={} if self._format.name == "html" else columns,
            rows=self._rows,
            shards=[file.path for file in written if "part-" in file.path],
        )
        (self._folder / CARD).write_text(text, encoding="utf-8")
        return [*written, Written(CARD, 0)]


def card(
    facts: RunFacts,
    settings: Asked,
    *,
    format: str,
    columns: dict[str, str],
    rows: int,
    shards: Sequence[str],
) -> str:
    header = yaml.safe_dump(_header(facts, settings, rows, shards), sort_keys=False)
    versions = f"{facts.versions[0]} to {facts.versions[1]}" if facts.versions else "not known"
    parts = [
        f"---\n{header}---\n",
        f"# {_plain(settings.title)}\n",
        _ABOUT.get(format, ""),
        "",
        "## What is in it\n",
        *_table(
            ("", "rollouts", "groups", "mean reward"),
            [
                (_code(name), part.rollouts, part.groups, _number(part.mean_reward))
                for name, part in [*facts.by_env.items(), ("all", facts.total)]
            ],
        ),
        f"\n{rows:,} rows; {facts.tokens:,} tokens in {facts.rows:,} training rows, of which "
        f"{facts.sampled:,} were sampled by the model; {facts.truncated:,} rollouts were cut off.",
        "\n### Rewards\n",
        *_histogram(facts),
        *_features(columns),
        "\n## Where it comes from\n",
        f"- Environments: {_names(facts.by_env)}",
        f"- Models: {_names(facts.models)}; policy versions: {versions}",
        f"- Splits of the tasks: {_names(facts.splits)}",
        f"- Made: {_day(facts.first_at)} to {_day(facts.last_at)}",
        f"- Read from: {_names(settings.sources)}",
        f"- Written by envserver {__version__} as `{format}`; `{MANIFEST}` has the checksums and "
        "how many rollouts were left out, and why",
        "\n## Filter\n",
        *(f"- {_code(name)}: {_code(str(value))}" for name, value in settings.filter.items()),
        *([] if settings.filter else ["None: every rollout with a place in this form."]),
        "\n## Decontamination\n",
        _decontamination(settings),
        "\n## License\n",
        "Not named yet: the publisher chooses the license, with regard to those of "
        "the tasks and of the model.",
    ]
    return "\n".join(parts) + "\n"


def public_name(source: str) -> str:
    """Returns what may be published of a source: a file's name, a URL's host and last part."""
    if "://" not in source:
        return Path(source).name or source
    parts = urlsplit(source)
    host = (parts.hostname or "") + (f":{parts.port}" if parts.port else "")
    last = parts.path.rpartition("/")[2]
    return f"{parts.scheme}://{host}" + (f"/{last}" if last else "")


def _header(facts: RunFacts, settings: Asked, rows: int, shards: Sequence[str]) -> Json:
    size = next((size for most, size in _SIZES.items() if rows < most), "n>1M")
    header: Json = {
        "pretty_name": _plain(settings.title),
        "license": "unknown",
        "task_categories": ["text-generation"],
        "tags": [
            "envserver",
            "rollouts",
            "reinforcement-learning",
            *map(_tag, list(facts.by_env)[:5]),
        ],
        "size_categories": [size],
    }
    if not shards:
        return {**header, "viewer": False}
    [split] = list(facts.splits) if len(facts.splits) == 1 else ["train"]
    files = {
        "split": split if split in _SPLITS else "train",
        "path": re.sub(r"part-\d+", "part-*", shards[0]),
    }
    config = {"config_name": "default", "data_files": [files]}
    return {**header, "configs": [config]}


def _histogram(facts: RunFacts) -> Iterator[str]:
    most = max([1, *facts.histogram])
    bins = facts.bins()
    width = max(len(name) for name, _ in bins)
    yield "```"
    for name, count in bins:
        bar = "█" * round(_BAR * count / most)
        yield f"{name:<{width}}  {bar:<{_BAR}} {count:,}"
    yield "```"
    if facts.axis is None:
        yield "\nFrom the lowest to the highest reward that each environment gives."
    if facts.below or facts.above:
        yield f"\nBelow that: {facts.below:,}; above: {facts.above:,}."


def _features(columns: dict[str, str]) -> Iterator[str]:
    if columns:
        yield "\n## Features\n"
        rows = [(_code(name), _code(kind)) for name, kind in columns.items()]
        yield from _table(("column", "type"), rows)


def _decontamination(settings: Asked) -> str:
    if not settings.against:
        return "None was done."
    names = _names(settings.against)
    return f"No rollout has {settings.against_words} words in a row in common with {names}."


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(str(cell) for cell in row)} |"


def _kind(value: Any) -> str:
    names = {str: "string", bool: "bool", int: "int", float: "float", list: "list", dict: "object"}
    return names.get(type(value), "null" if value is None else type(value).__name__)


def _names(names: Sequence[str] | Json) -> str:
    return ", ".join(map(_code, names)) or "none"


def _code(text: str) -> str:
    return f"`{_plain(text, '`|')}`"


def _plain(text: str, without: str = "`|<>[]") -> str:
    cut = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    shown = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+", " ", cut)
    return shown.translate(dict.fromkeys(map(ord, without), "'")).strip() or "unnamed"


def _tag(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text[:_LONGEST]).strip("-") or "unnamed"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _day(seconds: float | None) -> str:
    try:
        return "unknown" if seconds is None else time.strftime("%Y-%m-%d", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "unknown"
