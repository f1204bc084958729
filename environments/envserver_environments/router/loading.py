"""Rows: our own (`query`, `plan` as a graph, and what running it needs), those of the CourseGPT
router data (`user_query`, `route_plan` and the other keys), its form for fine-tuning (`prompt`,
`completion`), or a bare right plan in either profile, also under the key `gold`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from envserver_environments.rows import (
    DataSets,
    Division,
    Row,
    decoded,
    fields_of,
    last_message,
    missing,
    published,
    roles_of,
    spelled,
)
from envserver_records.tasks import Json

from envserver import ConfigError, InputError, NotFoundError, Task
from envserver.rows.sources import every_row

from .course import (
    COURSE,
    COURSE_KEYS,
    Plan,
    PlanError,
    as_json,
    chain_of,
    course_of,
    plan_of,
    plan_of_course,
)

Profile = Literal["graph", "coursegpt"]

SAMPLE = Path(__file__).parent / "data" / "sample.jsonl"
SAMPLE_DOCUMENTS = SAMPLE.with_name("documents.jsonl")


ROLES, HUBS = published(__file__)
DATA = DataSets(SAMPLE, HUBS, dict.fromkeys(HUBS, Division()))

_QUERY_MARK = "User query:\n"
_FENCE = re.compile(r"\s*```(?:json)?\n(.*?)\n```\s*", re.DOTALL)


@dataclass(frozen=True)
class Problem:
    """A query to route."""

    query: str
    profile: Profile  # of the plan in its row
    plan: Plan | None = None  # the right one
    target: Json | None = None  # the ten keys of the profile `coursegpt`
    documents: list[dict[str, str]] = field(default_factory=list)  # each with `title` and `text`
    answer: Json | None = None  # kinds: number and text (`answers`), function
    results: dict[str, str] = field(default_factory=dict)  # of each step of a right execution

    def gold(self, profile: Profile) -> tuple[Plan, Json | None]:
        """The right plan as it is scored in `profile`, with the ten keys where that has them."""
        if self.plan is None:
            raise InputError("The row has no plan.")
        if profile == "graph":
            return self.plan, None
        target = self.target or course_of(self.plan, self.query)
        try:
            return plan_of_course(target), target
        except PlanError as error:
            raise InputError(f"The row's plan is not valid: {error.kind}.") from error


def read_problem(row: Row, columns: Mapping[str, str] | None = None) -> Problem:
    problem = read_query(row, columns)
    found = roles_of(row, ROLES, columns or {})
    said = last_message(found.get("plan", row), "assistant", "gpt")
    fenced = _FENCE.fullmatch(said) if isinstance(said, str) else None
    gold = _plain(decoded(fenced[1] if fenced else said))
    if not isinstance(gold, dict) or not gold.keys() & {"steps", "route_plan"}:
        raise missing(row, ["plan"] if problem.query else ["query", "plan"])
    try:
        if "route_plan" in gold:
            if lacking := [key for key in COURSE_KEYS if key not in gold]:
                raise InputError(f"The row's plan lacks {', '.join(lacking)} ({fields_of(gold)}).")
            kinds = COURSE["properties"]
            target = {
                key: gold[key] if kinds[key].get("type") in (None, "string") else decoded(gold[key])
                for key in COURSE_KEYS
            }
            return Problem(problem.query, "coursegpt", plan_of_course(target), target)
        plan = plan_of(gold)
    except PlanError as error:
        raise InputError(f"The row's plan is not valid: {error.kind}.") from error
    results = _plain(decoded(found.get("results", {})))
    if not isinstance(results, dict):
        raise InputError("The row's results are not an object of the steps' results.")
    texts = {step: str(value) for step, value in results.items()}
    return dataclasses.replace(problem, plan=plan, results=texts)


def read_query(row: Row, columns: Mapping[str, str] | None = None) -> Problem:
    """Reads the query in a row, with what running a plan for it needs; the plan is left out."""
    found = roles_of(spelled(row), ROLES, columns or {})
    query, answer = last_message(found.get("query")), found.get("answer")
    parsed = decoded(answer)
    return Problem(
        query.rpartition(_QUERY_MARK)[2].strip() if isinstance(query, str) else "",
        "graph",
        documents=checked_documents(decoded(found.get("documents", [])), "The row"),
        answer=_answer(_plain(parsed) if isinstance(parsed, Mapping) else answer),
    )


def answer_of(text: str) -> Json:
    try:
        float(text.replace(",", ""))
    except ValueError:
        return {"kind": "text", "answers": [text]}
    return {"kind": "number", "answers": [text]}


def read_documents(path: Path) -> list[dict[str, str]]:
    """The documents in a file: JSON or JSONL with objects of `title` and `text`, else one text."""
    if path.suffix in (".jsonl", ".json"):
        return checked_documents([*every_row(path)], str(path))
    try:
        return [{"title": path.name, "text": path.read_text(encoding="utf-8")}]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def checked_documents(found: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(found, list) or not all(_is_document(document) for document in found):
        hint = 'A list is needed of {"title": ..., "text": ...}.'
        raise InputError(f"{where} holds no documents.", hint=hint)
    return [{"title": document["title"], "text": document["text"]} for document in found]


def public_part(problem: Problem, profile: Profile) -> Json:
    return {
        "query": problem.query,
        "profile": profile,
        "documents": problem.documents,
        "entry_point": (problem.answer or {}).get("entry_point", ""),
        "runs": problem.answer is not None,
    }


def hidden_part(problem: Problem, profile: Profile) -> Json:
    plan, target = (None, None) if problem.plan is None else problem.gold(profile)
    return {
        "plan": None if plan is None else as_json(plan),
        "target": target,
        "answer": problem.answer,
        "results": _results(problem, profile),
    }


def _results(problem: Problem, profile: Profile) -> dict[str, str]:
    if problem.plan is None or profile == "graph" or problem.profile == profile:
        return problem.results
    steps = enumerate(chain_of(problem.plan), 1)
    known = problem.results
    return {f"s{number}": known[step.id] for number, step in steps if step.id in known}


def _answer(value: Any) -> Json | None:
    match value:
        case None:
            return None
        case str() | int() | float():
            return answer_of(str(value))
        case {"kind": "number" | "text", "answers": [str() | int() | float(), *_] as answers}:
            return {**value, "answers": [str(answer) for answer in answers]}
        case {"kind": "function", "entry_point": str(), "tests": list()}:
            return {"code": None, **value}
    raise InputError("The row's answer cannot be checked.")


def _plain(value: Any) -> Any:
    """The value without nulls: in a table, objects have the fields of all rows."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _is_document(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(k), str) for k in ("title", "text"))


DUPLICATE = "duplicate query"
NAMED = 5
"""Maximum number of bad lines that an error names."""

_logger = logging.getLogger(__name__)


def query_tasks(path: Path | None, profile: Profile, *, skip_bad: bool) -> Iterator[Task]:
    """Yields a task for each query of the file at `path`; any valid plan solves it."""
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
