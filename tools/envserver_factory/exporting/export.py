"""The work of `envserver export`: delivered groups in, files in one format out.

The counts add up: `read` equals `kept` plus what was dropped, by reason. One group is in memory;
beside it 16 bytes for each rollout if duplicates are looked for, and the evaluation sets.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import math
import operator
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
from envserver_records.errors import ConfigError, InputError, NotFoundError
from envserver_records.records import Json, Message, text_of
from numpy.typing import NDArray

from envserver.export.stored import StoredGroup, StoredRollout, read_groups
from envserver.export.stored_sources import decoded, opened
from envserver.export.unified import called

from .formats import Format, finish, place_for, writing

Choice = Literal["all", "best", "shortest"]

NAMES = (*StoredRollout.__struct_fields__, "domain", "length", "sampled", "failed")
"""Names that an expression may use."""
_WITH_PARTS = ("components", "metrics", "agent_metrics", "usage")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (len, min, max, abs, sum, any, all)
}


class Where:
    """An expression such as `reward >= 0.8 and turns < 6 and 'lossy_detok' not in flags`.

    An unknown value (None, a missing component) compares as neither more nor less than anything.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._body = _parsed(text)
        self._evaluator = _evaluator(self._value)
        self._known: dict[str, Any] = {}

    def __call__(self, rollout: StoredRollout) -> bool:
        self._rollout = rollout
        self._known = {}
        try:
            return bool(self._evaluator.eval(self._text, previously_parsed=self._body))
        except Exception as error:
            raise InputError(
                f"--where {self._text!r} has no answer for the rollout {rollout.rollout_id}: "
                f"{error}.",
                place=rollout.rollout_id,
            ) from error

    def _value(self, name: ast.Name) -> Any:
        if name.id not in NAMES:
            raise KeyError(name.id)
        if name.id not in self._known:
            value = getattr(self._rollout, name.id)
            self._known[name.id] = _Parts(value) if name.id in _WITH_PARTS else value
        return self._known[name.id]


def chosen(rollouts: Sequence[StoredRollout], choice: Choice) -> list[StoredRollout]:
    """Returns all rollouts of a group, the best (the shortest of several), or the shortest."""
    if choice == "all" or not rollouts:
        return list(rollouts)
    if choice == "shortest":
        return [min(rollouts, key=lambda rollout: (said(rollout), rollout.rollout_id))]
    return [
        min(rollouts, key=lambda rollout: (-_reward(rollout), said(rollout), rollout.rollout_id))
    ]


def said(rollout: StoredRollout) -> tuple[int, int]:
    """Returns how much the model wrote: tokens where known, then characters."""
    tokens = rollout.sampled or int(rollout.usage.get("completion_tokens") or 0)
    answers = (message for message in rollout.messages if message.get("role") == "assistant")
    return tokens, sum(len(text_of(message)) for message in answers)


def _reward(rollout: StoredRollout) -> float:
    return -math.inf if rollout.reward is None else rollout.reward


class _Parts(dict[str, Any]):
    def __missing__(self, name: str) -> None:
        return None


def _parsed(text: str) -> ast.expr:
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = error.msg if isinstance(error, SyntaxError) else error
        raise ConfigError(
            f"--where {text!r} is not an expression: {why}.",
            hint="For example: reward >= 0.8 and turns < 6 and 'lossy_detok' not in flags",
        ) from error
    bound = {
        node.id
        for node in ast.walk(body)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    for node in ast.walk(body):
        _check(node, text, bound)
    return body


def _check(node: ast.AST, text: str, bound: set[str]) -> None:
    if isinstance(node, ast.Attribute | ast.Lambda | ast.NamedExpr | ast.JoinedStr):
        raise ConfigError(
            f"--where {text!r} cannot have {type(node).__name__.lower()}s in it.",
            hint="Parts are named as components['format'].",
        )
    if isinstance(node, ast.Name) and node.id not in {*NAMES, *FUNCTIONS, *bound}:
        from difflib import get_close_matches

        near = get_close_matches(node.id, [*NAMES, *FUNCTIONS], 1)
        words = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(NAMES)}."
        raise ConfigError(f"--where: there is no {node.id!r}.", hint=words)


def _evaluator(names: Callable[[ast.Name], Any]) -> Any:
    from simpleeval import (  # type: ignore[import-untyped]
        DEFAULT_OPERATORS,
        EvalWithCompoundTypes,
    )

    compared = {
        ast.Lt: operator.lt,
        ast.LtE: operator.le,
        ast.Gt: operator.gt,
        ast.GtE: operator.ge,
    }
    operators = {**DEFAULT_OPERATORS, **{k: _of_known(v) for k, v in compared.items()}}
    evaluator = EvalWithCompoundTypes(
        operators=operators, functions=dict(FUNCTIONS), names=names, allowed_attrs={}
    )
    evaluator.nodes.pop(ast.Attribute, None)
    return evaluator


def _of_known(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda left, right: left is not None and right is not None and compare(left, right)


class Seen:
    """The rollouts seen so far; each takes 16 bytes of memory.

    Equal are conversations with the same roles, texts and calls, with white space normalised and
    the keys of arguments in any order; without conversations tokens, without tokens outputs.
    """

    def __init__(self) -> None:
        self._digests: set[bytes] = set()

    def add(self, rollout: StoredRollout) -> bool:
        """Remembers `rollout`; returns whether it is new."""
        before = len(self._digests)
        self._digests.add(digest_of(rollout))
        return len(self._digests) > before


def digest_of(rollout: StoredRollout) -> bytes:
    """Returns 16 bytes, equal for equal rollouts of the same environment."""
    content: Any
    if rollout.messages:
        conversations = [rollout.messages, *(other.get("messages") for other in rollout.others)]
        content = [[_message(message) for message in messages or []] for messages in conversations]
    elif rollout.rows:
        content = [row.tokens.tolist() for row in rollout.rows]
    else:
        content = [rollout.task_id, rollout.output]
    data = orjson.dumps([rollout.env, content], default=str, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(data, digest_size=16).digest()


def _message(message: Message) -> list[Any]:
    calls = [called(call) for call in message.get("tool_calls") or ()]
    return [message.get("role"), normal(text_of(message)), calls]


def normal(text: str) -> str:
    """Returns `text` with single spaces between words, in one Unicode form."""
    return " ".join(unicodedata.normalize("NFC", text).split())


Hashes = NDArray[np.uint64]

WORDS = 13
SHORTEST = 5
_QUESTIONS = (
    *("question", "problem", "prompt", "query", "instruction", "instructions", "task"),
    *("input", "text", "messages", "problem_statement", "user_query", "Question"),
)
"""Keys that are read from a row that has any of them; else all its texts are read."""
_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst", ".ndjson.gz", ".ndjson.zst")
_READ = (*_LINES, ".json", ".txt", ".md")
_WORD = re.compile(r"\w+")
_PRIME = np.uint64(0x9E3779B97F4A7C15)
_GATHERED = 1 << 20


class Forbidden:
    """The n-grams of evaluation sets."""

    def __init__(self, words: int = WORDS) -> None:
        self.words = words
        self.texts = 0
        self.too_short = 0
        """Texts too short to count."""
        self._known: dict[int, Hashes] = {}
        self._new: dict[int, list[Hashes]] = {}
        self._waiting = 0

    def read(self, sources: Sequence[str]) -> None:
        """Adds all texts of files, and of the files of folders."""
        for path in _files(sources):
            for text in _texts(path):
                self.add(text)
        self._settle()

    def add(self, text: str) -> None:
        self.texts += 1
        hashes = _words(text)
        size = min(self.words, len(hashes))
        if size < min(SHORTEST, self.words):
            self.too_short += 1
            return
        grams = _grams(hashes, size)
        self._new.setdefault(size, []).append(grams)
        self._waiting += len(grams)
        if self._waiting >= _GATHERED:
            self._settle()

    def is_in(self, text: str) -> bool:
        """Whether any added n-gram occurs in `text`."""
        self._settle()
        hashes = _words(text)
        return any(
            bool(_found(_grams(hashes, size), known).any())
            for size, known in self._known.items()
            if len(hashes) >= size
        )

    def is_in_rollout(self, rollout: StoredRollout) -> bool:
        """Whether one occurs in its conversations, without system messages."""
        conversations = [
            rollout.messages,
            *(other.get("messages") or [] for other in rollout.others),
        ]
        return any(
            self.is_in(text_of(message))
            for messages in conversations
            for message in messages
            if message.get("role") not in ("system", "developer")
        )

    def _settle(self) -> None:
        for size, new in self._new.items():
            known = self._known.get(size)
            self._known[size] = np.unique(np.concatenate(new if known is None else [known, *new]))
        self._new.clear()
        self._waiting = 0


def _files(sources: Sequence[str]) -> Iterator[Path]:
    for source in sources:
        path = Path(source)
        if path.is_dir():
            found = [file for file in sorted(path.rglob("*")) if file.name.endswith(_READ)]
            files = [file for file in found if file.is_file()]
        else:
            files = [path] if path.is_file() else []
        if not files:
            raise NotFoundError(
                f"--against {source}: there is nothing to read.",
                hint=f"Files and folders of them: {', '.join(_READ)}.",
            )
        yield from files


def _texts(path: Path) -> Iterator[str]:
    with opened(path) as file:
        if path.name.endswith(_LINES):
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield from _of_row(decoded(line, f"{path}, line {number}"))
        elif path.suffix == ".json":
            value = decoded(file.read(), str(path))
            for row in value if isinstance(value, list) else [value]:
                yield from _of_row(row)
        else:
            yield from _paragraphs(file)


def _paragraphs(file: Any) -> Iterator[str]:
    lines: list[str] = []
    for data in file:
        line = data.decode("utf-8", "replace").strip()
        if line:
            lines.append(line)
        elif lines:
            yield " ".join(lines)
            lines = []
    if lines:
        yield " ".join(lines)


def _of_row(row: Any) -> Iterator[str]:
    if isinstance(row, dict) and (keys := [key for key in _QUESTIONS if row.get(key)]):
        for key in keys:
            yield from _of_messages(row[key]) if key == "messages" else _strings(row[key])
    else:
        yield from _strings(row)


def _of_messages(value: Any) -> Iterator[str]:
    """Yields the user's messages; system messages may be part of every rollout."""
    for message in value if isinstance(value, list) else []:
        if isinstance(message, dict) and message.get("role") == "user":
            yield text_of(message)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _words(text: str) -> Hashes:
    """Returns uint64[W], one hash for each word."""
    words = _WORD.findall(unicodedata.normalize("NFKC", text).lower())
    return np.fromiter((_hash(word) for word in words), np.uint64, len(words))


@functools.lru_cache(1 << 16)
def _hash(word: str) -> int:
    digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _grams(words: Hashes, size: int) -> Hashes:
    """Returns uint64[W - size + 1], one hash for each run of `size` words; word order matters."""
    number = len(words) - size + 1
    grams = np.zeros(number, np.uint64)
    for offset in range(size):
        grams = grams * _PRIME + words[offset : offset + number]
        grams ^= grams >> np.uint64(29)
    return grams


def _found(grams: Hashes, known: Hashes) -> NDArray[np.bool_]:
    at = np.searchsorted(known, grams)
    found: NDArray[np.bool_] = known[np.minimum(at, len(known) - 1)] == grams
    return found


SCHEMA_VERSION = 1

DROPPED = {
    "where": "excluded by --where",
    "min_reward": "below --min_reward",
    "contaminated": "with a piece of an evaluation set",
    "not_chosen": "not chosen by --per_group",
    "duplicate": "the same as one before",
}
"""Why a rollout is not in an export."""


@dataclass
class Tally:
    """The result of an export; `dropped` by the first reason. `kept` may be in no pair."""

    groups: int = 0
    rollouts: int = 0
    kept: int = 0
    rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    bad: int = 0
    first_bad: str = ""
    files: int = 0
    bytes: int = 0

    def counts(self) -> Json:
        return {
            "groups": self.groups,
            "read": self.rollouts,
            "kept": self.kept,
            "rows": self.rows,
            "dropped": {reason: self.dropped[reason] for reason in DROPPED},
            "bad_lines": self.bad,
        }


@dataclass(frozen=True)
class Wanted:
    """Selects rollouts; the filters apply in this order.

    A rollout without a reward is below every `min_reward`; `distinct` drops what came before.
    """

    where: Where | None = None
    min_reward: float | None = None
    forbidden: Forbidden | None = None
    per_group: Choice = "all"
    distinct: Seen | None = None

    def of(self, group: StoredGroup, dropped: Counter[str]) -> list[StoredRollout]:
        """Returns the selected rollouts of `group`; counts the others in `dropped`."""
        passed = []
        for rollout in group.rollouts:
            reason = self._refusal(rollout)
            if reason is None:
                passed.append(rollout)
            else:
                dropped[reason] += 1
        kept = chosen(passed, self.per_group)
        dropped["not_chosen"] += len(passed) - len(kept)
        if self.distinct is None:
            return kept
        new = [rollout for rollout in kept if self.distinct.add(rollout)]
        dropped["duplicate"] += len(kept) - len(new)
        return new

    def _refusal(self, rollout: StoredRollout) -> str | None:
        if self.where is not None and not self.where(rollout):
            return "where"
        if self.min_reward is not None and (
            rollout.reward is None or rollout.reward < self.min_reward
        ):
            return "min_reward"
        if self.forbidden is not None and self.forbidden.is_in_rollout(rollout):
            return "contaminated"
        return None


def export(
    sources: Sequence[str],
    format: Format,
    out: Path,
    *,
    wanted: Wanted,
    facts: Json,
    shard_rows: int,
    overwrite: bool = False,
    skip_bad: bool = False,
    on_progress: Callable[[Tally, int], None] = lambda tally, size: None,
) -> Tally:
    """Writes the rollouts of `sources` that `wanted` selects to `out`.

    `out` is a folder, or a file if its name has a file's ending.
    """
    single = out.suffix in (".jsonl", format.suffix)
    tally, read = Tally(), Counter[str]()

    def on_bad(error: InputError) -> None:
        tally.bad += 1
        tally.first_bad = tally.first_bad or str(error)

    def on_bytes(number: int) -> None:
        read["bytes"] += number

    with place_for(out, overwrite=overwrite, single=single) as place:
        with writing(out):
            writer = format.writer(place.folder, None if single else shard_rows)
        for group in read_groups(sources, on_bad if skip_bad else None, on_bytes):
            for row in _rows(group, format, wanted, tally):
                with writing(out):
                    writer.put(row)
                tally.rows += 1
            on_progress(tally, read.pop("bytes", 0))
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "format": format.name,
            "sources": list(sources),
            **facts,
            "counts": tally.counts(),
        }
        with writing(out):
            made = finish(place, writer.close(), manifest)
    tally.files, tally.bytes = made["files"], made["bytes"]
    return tally


def _rows(group: StoredGroup, format: Format, wanted: Wanted, tally: Tally) -> Iterator[Any]:
    tally.groups += 1
    tally.rollouts += len(group.rollouts)
    kept = wanted.of(group, tally.dropped)
    tally.kept += len(kept)
    return format.rows(group, kept) if kept else iter(())
