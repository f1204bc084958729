"""Loads the data sets of this environment and the corpora to search."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from envserver_environments.rows import DataSets, Hub
from envserver_tools.retrieval import Passage, passages_from

from envserver import ConfigError, InputError, NotFoundError
from envserver.rows.sources import every_row

_FOLDER = Path(__file__).parent / "data"
SAMPLE = _FOLDER / "sample.jsonl"
OWN_CORPUS = _FOLDER / "corpus.jsonl"

HUBS: dict[str, Hub] = {
    "hotpotqa": Hub(
        "hotpotqa/hotpot_qa", {"train": "train", "validation": "validation"}, ("distractor",)
    ),
    # The authors' own data are not on the hub.
    "2wiki": Hub("framolfese/2WikiMultihopQA", {"train": "train", "validation": "validation"}),
    "musique": Hub("dgslibisey/MuSiQue", {"train": "train", "validation": "validation"}),
    "afm": Hub("PersonalAILab/AFM-MHQA-RL-Dataset", {"train": "train"}),
}
"""The answers of the test splits are not public."""
DATA = DataSets(SAMPLE, HUBS)


def read_corpus(path: Path) -> Iterator[Passage]:
    """Returns the passages of a JSONL file, one per line: `title`, and `sentences`, `text` or
    `contents`.
    """
    if not path.is_file():
        raise NotFoundError(f"There is no corpus file {str(path)!r}.")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield Passage.from_data(json.loads(line))
            except (ValueError, InputError) as error:
                raise ConfigError(f"{path}, line {number} is not a passage: {error}") from error


def read_aliases(path: Path | None) -> dict[str, list[str]]:
    """Returns the names of answers by `Q_id`, as in 2Wiki's `id_aliases.json`; none without a
    path.
    """
    found = [] if path is None else list(every_row(path))
    if not all("Q_id" in row for row in found):
        raise ConfigError(f"{path} has no names by Q_id, as 2Wiki's id_aliases.json has them.")
    return {row["Q_id"]: [*row.get("aliases", []), *row.get("demonyms", [])] for row in found}


@functools.cache
def own_passages() -> Mapping[str, Passage]:
    """The passages of the sample by their titles, of which no two are the same."""
    return {passage.title: passage for passage in read_corpus(OWN_CORPUS)}


def different(passages: Iterable[Passage]) -> Iterator[Passage]:
    """Yields each passage once, in order of first appearance."""
    seen: set[str] = set()
    for passage in passages:
        if passage.key not in seen:
            seen.add(passage.key)
            yield passage


def read_context(path: Path) -> list[Passage]:
    """Returns the passages in a person's file for one question.

    `.jsonl` and `.json` hold them as a corpus does. Any other file is text: passages are separated
    by blank lines; a first line that begins with `#` is a title.
    """
    if not path.is_file():
        raise NotFoundError(f"There is no file {str(path)!r}.")
    try:
        if path.suffix == ".jsonl":
            passages = list(read_corpus(path))
        elif path.suffix == ".json":
            passages = list(passages_from(json.loads(path.read_bytes())))
        else:
            passages = list(_of_text(path.read_text(encoding="utf-8-sig")))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if not passages:
        raise InputError(f"{path} holds no passages.")
    return passages


def _of_text(text: str) -> Iterator[Passage]:
    title, number = "", 0
    for block in re.split(r"\n\s*\n", text.strip()):
        lines = [line.strip() for line in block.splitlines()]
        if lines and lines[0].startswith("#"):
            title, lines = lines[0].lstrip("#").strip(), lines[1:]
        if lines:
            number += 1
            yield Passage(title or f"Passage {number}", tuple(lines))
            title = ""
