"""Finds rollouts that overlap with evaluation sets, by n-grams of words.

In: evaluation sets (JSONL, JSON or text). Out: `Forbidden`, which tells whether any run of n words
of a text occurs in one of them. Words are letters and digits, in lower case. An n-gram takes 8
bytes, sorted; a false alarm is less likely than one in a billion for a million texts. A text of
fewer than n words counts as a whole if it has at least five words.
"""

from __future__ import annotations

import functools
import hashlib
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from envserver_records.errors import NotFoundError
from envserver_records.records import text_of
from numpy.typing import NDArray

from .stored import StoredRollout
from .stored_files import decoded, opened

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
    """The n-grams of evaluation sets.

    Args:
        words: length of an n-gram.
    """

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
        """Adds one text."""
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
        """Returns whether any added n-gram occurs in `text`."""
        self._settle()
        hashes = _words(text)
        return any(
            bool(_found(_grams(hashes, size), known).any())
            for size, known in self._known.items()
            if len(hashes) >= size
        )

    def is_in_rollout(self, rollout: StoredRollout) -> bool:
        """Returns whether one occurs in its conversations, without system messages."""
        conversations = [rollout.messages, *(one.get("messages") or [] for one in rollout.others)]
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
            found = [one for one in sorted(path.rglob("*")) if one.name.endswith(_READ)]
            files = [one for one in found if one.is_file()]
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
    """Yields texts between empty lines."""
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
