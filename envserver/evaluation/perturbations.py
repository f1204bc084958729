"""Perturbed questions: the same question written otherwise, for measures of robustness. Pure.

The same text and seed give the same perturbation; code, formulas, quotations, numbers and names
with signs in them stay as they are, so that the answer stays the same.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec
from envserver_records.errors import ConfigError
from envserver_records.records import Task

from ..export.stored_sources import records

QUESTIONS: Final = ("question", "query", "problem", "instruction", "prompt")
"""Names under which the public part of a task may hold its question; the first one counts."""
PARAPHRASE: Final = "paraphrase"
_KEPT: Final = re.compile(
    r"(```.*?```|`[^`]*`|\$[^$]*\$|\"[^\"]*\"|\S*[\d_/\\=(){}\[\]<>^@#&|]\S*)", re.DOTALL
)
_WORD: Final = re.compile(r"[a-z]{4,}")
_CAPITAL: Final = re.compile(r"\b[A-Z][a-z]+")
_SPACE: Final = re.compile(r"(?<=\S) (?=\S)")
_SENTENCE: Final = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_TYPO_SHARE: Final = 0.1
_SPACE_SHARE: Final = 0.2


def typos(text: str, rng: random.Random) -> str:
    """Swaps two letters in a tenth of the words, at least in one."""
    words = [match.start() for match in _WORD.finditer(text)]
    chosen = set(rng.sample(words, math.ceil(len(words) * _TYPO_SHARE)))

    def change(match: re.Match[str]) -> str:
        word = match[0]
        if match.start() not in chosen:
            return word
        at = rng.randrange(1, len(word) - 2)
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]

    return _WORD.sub(change, text)


def lower_case(text: str, rng: random.Random) -> str:
    return _CAPITAL.sub(lambda match: match[0].lower(), text)


def spaces(text: str, rng: random.Random) -> str:
    """Doubles a fifth of the spaces, at least one."""
    places = [match.start() for match in _SPACE.finditer(text)]
    chosen = set(rng.sample(places, math.ceil(len(places) * _SPACE_SHARE)))
    return _SPACE.sub(lambda match: "  " if match.start() in chosen else " ", text)


def sentences(text: str, rng: random.Random) -> str:
    """Puts the last sentence, in most tasks the question, first."""
    *others, last = _SENTENCE.split(text.strip())
    return " ".join([last, *others])


_WITHIN: Final[Mapping[str, Callable[[str, random.Random], str]]] = {
    "typos": typos,
    "lower_case": lower_case,
    "spaces": spaces,
}
KINDS: Final = (*_WITHIN, "sentences")


def perturbed(text: str, kind: str, seed: str) -> str:
    rng = random.Random(f"{seed}-{kind}")
    if kind == "sentences":
        return sentences(text, rng)
    parts = _KEPT.split(text)  # every second one is kept
    return "".join(
        part if number % 2 else _WITHIN[kind](part, rng) for number, part in enumerate(parts)
    )


class Asking(msgspec.Struct, frozen=True, kw_only=True):
    """A way to ask the tasks of an evaluation: their perturbation, or paraphrases by task id."""

    kind: str
    paraphrases: Mapping[str, str] = {}

    def asked(self, task: Task) -> Task | None:
        name = next((field for field in QUESTIONS if task.public.get(field)), None)
        question = task.public.get(name) if name else None
        if name is None or not isinstance(question, str):
            raise ConfigError(
                f"Task {task.id!r} has no question to perturb.",
                hint=f"The question must be in its public part, as {', '.join(QUESTIONS)}.",
            )
        if self.kind in KINDS:
            text: str | None = perturbed(question, self.kind, task.id)
        else:
            text = self.paraphrases.get(task.id)
        if text is None:
            return None
        return msgspec.structs.replace(task, public={**task.public, name: text})


def askings(kinds: list[str], paraphrases: Path | None) -> dict[str, Asking]:
    """Returns the ways to ask beside the original, by name; `paraphrases`: JSONL of {"task_id",
    "question"}."""
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ConfigError(
            f"There is no perturbation {unknown[0]!r}.", hint=f"There are {', '.join(KINDS)}."
        )
    found = {kind: Asking(kind=kind) for kind in kinds}
    for number, texts in enumerate(_read(paraphrases) if paraphrases else (), 1):
        found[f"{PARAPHRASE}_{number}"] = Asking(kind=PARAPHRASE, paraphrases=texts)
    return found


class _Line(msgspec.Struct):
    task_id: str
    question: str


def _read(path: Path) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    counts: Counter[str] = Counter()
    for line in records(path, _Line, "a paraphrase"):
        if counts[line.task_id] == len(found):
            found.append({})
        found[counts[line.task_id]][line.task_id] = line.question
        counts[line.task_id] += 1
    return found


def settings_of(askings: Mapping[str, Asking]) -> dict[str, dict[str, str]]:
    return {name: dict(asking.paraphrases) for name, asking in askings.items()}
