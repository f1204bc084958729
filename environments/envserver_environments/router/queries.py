"""Reads a file of queries for which plans are to be written (`data_set: queries`).

In: JSONL of objects with a query (and `documents`, `answer` where the plan is to be run), or a text
file with a query on each line. Out: tasks in the order of the file, each query once. What holds:
every line is checked before the first task is given, since each task costs a teacher's answer.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envserver import ConfigError, InputError, NotFoundError, Task

from .loading import Problem, Profile, hidden_part, public_part, read_query

DUPLICATE = "duplicate query"
NAMED = 5
"""Maximum number of bad lines that an error names."""

_logger = logging.getLogger(__name__)


def query_tasks(path: Path | None, profile: Profile, *, skip_bad: bool) -> Iterator[Task]:
    """Yields a task for each query of the file at `path`; any valid plan solves it.

    Args:
        skip_bad: leave out lines that are not queries.
    """
    if path is None:
        raise ConfigError(
            "No file of queries is given.", hint="--queries FILE, or --env.data_path FILE."
        )
    if path.suffix not in (".jsonl", ".ndjson", ".txt"):
        raise ConfigError(f"{path} is neither .jsonl nor .txt.", hint="One query on each line.")
    if not path.is_file():
        raise NotFoundError(f"There is no file of queries {str(path)!r}.")
    dropped: Counter[str] = Counter()
    seen: dict[bytes, Problem] = {}
    bad: list[str] = []
    for line, problem in _problems(path):
        if isinstance(problem, str):
            dropped[problem] += 1
            if len(bad) < NAMED:
                bad.append(f"line {line}: {problem}")
        elif (key := _key(problem)) in seen:
            dropped[DUPLICATE] += 1
        else:
            seen[key] = problem
    faults = dropped.total() - dropped[DUPLICATE]
    named = "; ".join(bad) + ("; ..." if faults > NAMED else "")
    if faults and not skip_bad:
        raise InputError(
            f"{path} has {faults} bad line{'s' * (faults > 1)}: {named}.",
            hint="--env.skip_bad true leaves them out.",
            place=str(path),
        )
    if dropped:
        where = f" ({named})" if bad else ""
        causes = ", ".join(f"{count} x {cause}" for cause, count in dropped.most_common(8))
        _logger.warning("%s: left out: %s%s", path, causes, where)
    if not seen:
        raise ConfigError(f"{path} has no query.")
    for key, problem in seen.items():
        hidden = {**hidden_part(problem, profile), "any_plan": True}
        yield Task(f"query-{key.hex()}", public_part(problem, profile), hidden)


def _problems(path: Path) -> Iterator[tuple[int, Problem | str]]:
    """Yields the number of each line, from 1, with its query or why it is none."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, _problem(line, is_text=path.suffix == ".txt")


def _problem(line: bytes, *, is_text: bool) -> Problem | str:
    try:
        text = line.decode("utf-8-sig")
        row: Any = {"query": text} if is_text else json.loads(text)
        json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair cannot be sent
    except UnicodeError:
        return "not UTF-8"
    except (ValueError, RecursionError):
        return "not JSON"
    if not isinstance(row, dict):
        return "not a JSON object"
    try:
        problem = read_query(row)
    except InputError as error:
        return error.message.rstrip(".")
    return problem if problem.query else "no query"


def _key(problem: Problem) -> bytes:
    """Returns a digest that is equal for queries that differ in case and white space only."""
    words = " ".join(problem.query.casefold().split())
    return hashlib.sha256(words.encode()).digest()[:16]
