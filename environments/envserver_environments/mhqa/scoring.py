"""Scores one rollout. Pure.

    reward = 0.8 * EM + 0.2 * F1        of one short answer
             0.2 * F1                   of a long one
             0                          of none, an empty one, several, a text cut off, or one that
                                        shares only words such as "and" with the gold

EM and F1 are Hotpot's, the best over the gold and its aliases; components hold the data sets' own
measures. A weight for support gives that share of the reward to the F1 of the evidence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from envserver_environments.answers import (
    arguments_of,
    json_objects,
    last_boxed,
    last_reply,
    text_in,
)
from envserver_records.tasks import Json
from envserver_tools.calling import visible_text
from envserver_tools.retrieval import passages_from

from envserver import Result, Score, Task

from .data_sets import MAX_ANSWER_CHARACTERS
from .metrics import (
    Measure,
    answer_measure,
    evidence_measure,
    fact_measure,
    joint_measure,
    musique_answer_measure,
    normalize_answer,
    support_measure,
    wiki2_fact_measure,
)
from .shelf import FINISH

# Where `finish` was not called, the first of these in the visible text is the answer:
#
#     1. the last <answer>...</answer>
#     2. `answer` of the last JSON object that has one which is a text or a number
#     3. what follows FINAL: at the start of a line, to the end
#     4. the inside of the last balanced \boxed{...}
#     5. the rest of the last line that says "answer:" or "final answer:"
#
# A box around the whole answer is removed.

_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_FINAL = re.compile(r"^[ \t]*FINAL:(.*)", re.MULTILINE | re.DOTALL)
_LINE = re.compile(r"\b(?:final\s+)?answer\s*:[ \t]*(\S.*)", re.IGNORECASE)
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf)\s*\{(.*)\}", re.DOTALL)
_DECODER = json.JSONDecoder(parse_float=str, parse_int=str)


def extract_answer(text: str) -> str | None:
    """Returns the answer in `text`; "" if it is empty, None if there is none."""
    seen = visible_text(text)
    if seen is None:
        return None
    for find in (_tagged, _json_answer, _final, _boxed, _last_line):
        answer = find(seen)
        if answer is not None:
            return _unboxed(answer)
    return None


def has_tagged_answer(text: str) -> bool:
    seen = visible_text(text)
    return seen is not None and _tagged(seen) is not None


def nested_objects(text: str) -> Iterator[Json]:
    """Yields the JSON objects near the end, and those in them, inner before outer; numbers stay
    text."""
    for value in json_objects(text, _DECODER):
        yield from _objects_in(value)


def _objects_in(value: Any) -> Iterator[Json]:
    """Yields the objects in `value`, inner before outer, without recursion."""
    objects: list[Json] = []
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            objects.append(part)
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    yield from reversed(objects)


def _tagged(seen: str) -> str | None:
    found = _TAGGED.findall(seen)
    return str(found[-1]).strip() if found else None


def _json_answer(seen: str) -> str | None:
    answers = [
        found["answer"] for found in nested_objects(seen) if isinstance(found.get("answer"), str)
    ]
    return answers[-1].strip() if answers else None


def _final(seen: str) -> str | None:
    found = _FINAL.search(seen)
    return found[1].strip() if found else None


def _boxed(seen: str) -> str | None:
    inside = last_boxed(seen)
    return None if inside is None else f"\\boxed{{{inside}}}"


def _unboxed(answer: str) -> str:
    inside = last_boxed(answer)
    if inside is None or answer != f"\\boxed{{{inside}}}":
        return answer
    wrapped = _WRAPPED.fullmatch(inside.strip())
    return (wrapped[1] if wrapped else inside).strip()


def _last_line(seen: str) -> str | None:
    for line in reversed(seen.splitlines()):
        found = list(_LINE.finditer(line))
        if found:
            return found[-1][1].strip().strip("*_` ")
    return None


EM_SHARE, F1_SHARE = 0.8, 0.2
SHORT_CHARACTERS = 64
SHORT_WORDS = 12
"""An answer whose normal form is longer than this and than every gold is not short."""

SMALL_WORDS = {
    *("and", "or", "not", "of", "in", "on", "at", "to", "for", "from", "with", "by", "as"),
    *("is", "was", "were", "are", "be", "it", "its", "that", "this"),
}
"""Words that any text shares with any gold: by themselves they earn nothing."""

_SEPARATORS = re.compile(r"[|;\n\r｜；]")


@dataclass(frozen=True)
class ModelAnswer:
    """A rollout's final output."""

    answer: str | None = None  # the argument of `finish`, or what was submitted otherwise
    text: str = ""  # the last text, which is searched if there is no answer
    facts: list[Any] = field(default_factory=list)  # title and sentence number
    passages: list[str] = field(default_factory=list)  # keys
    evidence: list[tuple[str, ...]] = field(default_factory=list)  # triples

    @property
    def final(self) -> str | None:
        return self.answer if self.answer is not None else extract_answer(self.text)


def score_rollout(task: Task, result: Result, support_weight: float = 0.0) -> Score:
    metrics = {
        "tool_errors": float(result.metrics.get("tool_errors", 0.0)),
        "truncated": float(result.truncated),
    }
    if result.truncated:
        return Score(reward=0.0, components={"em": 0.0, "f1": 0.0}, metrics=metrics)
    given = read_answer(result)
    answer, golds = given.final, task.hidden["golds"]
    if not golds:  # a question of a person who does not know the answer either
        return Score(reward=None, metrics=metrics)
    metrics["answered"] = float(answer is not None and bool(normalize_answer(answer)))
    measure = Measure() if answer is None else answer_measure(answer, golds)
    components = {"em": measure.em, "f1": measure.f1}
    metrics |= {"precision": measure.precision, "recall": measure.recall}
    metrics[f"em_{task.hidden['kind']}"] = measure.em
    if task.public["data_set"] == "musique" and answer is not None:
        metrics["musique_f1"] = musique_answer_measure(answer, golds).f1
    support = _support(task, given, measure, metrics)
    trouble = "no answer" if answer is None else why_refused(answer, golds)
    metrics["refused"] = float(trouble is not None)
    if trouble is not None:
        return Score(reward=0.0, components=components, metrics=metrics)
    reward = answer_reward(answer or "", golds, measure)
    if support is not None and support_weight:
        components["support"] = support.f1
        reward = (1 - support_weight) * reward + support_weight * support.f1
    return Score(reward=reward, components=components, metrics=metrics)


def why_refused(answer: str, golds: list[str]) -> str | None:
    """Returns why `answer` gets no reward despite shared words, or None if it may get one."""
    if not normalize_answer(answer):
        return "it is empty"
    if len(answer) > max(MAX_ANSWER_CHARACTERS, *map(len, golds)):
        return "it is too long"
    if _several(answer) and not any(map(_several, golds)):
        return "it is several answers"
    return None


def answer_reward(answer: str, golds: list[str], measure: Measure) -> float:
    """The reward of an answer that is not refused, without support."""
    if not measure.em and not _shares_content(answer, golds):
        return 0.0
    exact = EM_SHARE * measure.em if is_short(answer, golds) else 0.0
    return min(1.0, exact + F1_SHARE * measure.f1)


def _shares_content(answer: str, golds: list[str]) -> bool:
    words = set(normalize_answer(answer).split()) - SMALL_WORDS
    return any(words & set(normalize_answer(gold).split()) for gold in golds)


def is_short(answer: str, golds: list[str]) -> bool:
    """Returns whether `answer` is short, or at most as long as a gold."""
    plain = normalize_answer(answer)
    sizes = [(len(gold), len(gold.split())) for gold in map(normalize_answer, golds)]
    characters = max(SHORT_CHARACTERS, *(size for size, _ in sizes))
    words = max(SHORT_WORDS, *(count for _, count in sizes))
    return len(plain) <= characters and len(plain.split()) <= words


def read_answer(result: Result) -> ModelAnswer:
    output = result.output
    if isinstance(output, dict):
        return ModelAnswer(
            text_in(output.get("answer")),
            text_in(output.get("text")) or "",
            _facts(output.get("facts")),
            [key for key in _list(output.get("passages")) if isinstance(key, str)],
            _triples(output.get("evidence")),
        )
    if isinstance(output, str):
        return ModelAnswer(text=output)
    return last_answer(result.messages)


def last_answer(messages: list[Json]) -> ModelAnswer:
    message = last_reply(messages)
    return parse_answer(text_in(message.get("content")) or "", arguments_of(FINISH, message))


def parse_answer(text: str, finish: Json | None = None) -> ModelAnswer:
    """Without `finish`'s arguments, a JSON object with `answer` may also hold facts and
    evidence."""
    if finish is not None:
        answer, beside, facts = str(finish["answer"]), finish, finish.get("supporting_facts")
    else:
        named = [found for found in nested_objects(visible_text(text) or "") if "answer" in found]
        answer, beside = None, named[-1] if named else {}
        facts = _numbered(beside.get("supporting_facts"))
    return ModelAnswer(answer, text, _facts(facts), [], _triples(beside.get("evidence")))


def _support(
    task: Task, given: ModelAnswer, answer: Measure, metrics: dict[str, float]
) -> Measure | None:
    """Returns how right the evidence is, or None if the data set has none."""
    hidden = task.hidden
    if hidden["support"]:
        keys = given.passages or _keys_of_titles(task, given.facts)
        measured = {"support": support_measure(keys, hidden["support"])}
    elif hidden["supporting"]:
        is_wiki2 = task.public["data_set"] == "2wiki"
        measure = wiki2_fact_measure if is_wiki2 else fact_measure
        measured = {"support": measure(given.facts, supporting_facts(task))}
        if hidden["evidences"]:
            measured["evidence"] = evidence_measure(given.evidence, hidden["evidences"])
        measured["joint"] = joint_measure(answer, *measured.values())
    else:
        return None
    for name, part in measured.items():
        metrics |= {f"{name}_em": part.em, f"{name}_f1": part.f1}
    return measured["support"]


def supporting_facts(task: Task) -> list[tuple[str, int]]:
    """The titles and sentence numbers of a task's supporting facts."""
    passages = task.public["passages"]
    return [
        (passages[name]["title"] if isinstance(name, int) else name, number)
        for name, number in task.hidden["supporting"]
    ]


def _keys_of_titles(task: Task, facts: list[tuple[str, int]]) -> list[str]:
    titles = {title for title, _ in facts}
    passages = passages_from(task.public["passages"])
    return [passage.key for passage in passages if passage.title in titles]


def _several(text: str) -> bool:
    return bool(_SEPARATORS.search(text.strip())) or "or" in normalize_answer(text).split()


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _numbered(value: object) -> list[Any]:
    pairs = [pair for pair in _list(value) if isinstance(pair, list) and len(pair) == 2]
    return [
        [name, int(number) if isinstance(number, str) and number.isdecimal() else number]
        for name, number in pairs
    ]


def _facts(value: object) -> list[tuple[str, int]]:
    facts = []
    for pair in _list(value):
        match pair:
            case [str(title), int(number)]:
                facts.append((title, number))
    return facts


def _triples(value: object) -> list[tuple[str, ...]]:
    triples: list[tuple[str, ...]] = []
    for triple in _list(value):
        match triple:
            case [str(), str(), str()]:
                triples.append(tuple(triple))
    return triples
