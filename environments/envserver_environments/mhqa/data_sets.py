"""Converts the rows of each data set to `MultiHopQuestion`. Pure; loads nothing.

Five shapes of rows are known, each by the field names under which its data set is published, and
the shape of our own sample. The fields of a row say which one it has, never the name of a set.

    hotpotqa   `context` of titles and sentences, `supporting_facts`
    2wiki      the same, and `evidences`
    musique    `paragraphs` with `paragraph_text` and `is_supporting`
    own        as hotpotqa, and `question_decomposition`; `context_titles` name paragraphs elsewhere
    afm        a question and its answer or answers, without paragraphs
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from envserver_environments.rows import Row
from envserver_tools.retrieval import Passage

from envserver import InputError

from .metrics import normalize_answer

DataSet = Literal["sample", "hotpotqa", "2wiki", "musique", "afm"]

NO_ANSWER = "noanswer"
"""The answer where the paragraphs do not tell it."""
NO_ANSWERS = (NO_ANSWER, "no answer", "unanswerable", "not answerable")

MAX_ANSWER_CHARACTERS = 400

Fact = tuple[str, int]
"""Title of a paragraph and number of a sentence, from 0."""
Triple = tuple[str, str, str]
"""Subject, relation, object."""


@dataclass(frozen=True)
class MultiHopQuestion:
    """A question with its answers.

    Args:
        golds: the answer and its aliases.
        kind: the data set's name for it, such as bridge or comparison.
        hops: number of facts that must be found, or None if unknown.
        passages: passages of the question, among them those that answer it; may be empty.
        supporting: the sentences that answer it.
        support: keys of the passages that answer it, where whole passages are judged (MuSiQue).
        evidences: triples, each with all its accepted forms.
        decomposition: (question, answer) of each hop; `#1` refers to the first answer.
    """

    question: str
    golds: tuple[str, ...]
    data_set: str
    kind: str = "unknown"
    hops: int | None = None
    answerable: bool = True
    passages: tuple[Passage, ...] = ()
    supporting: tuple[Fact, ...] = ()
    support: tuple[str, ...] = ()
    evidences: tuple[tuple[Triple, ...], ...] = ()
    decomposition: tuple[tuple[str, str], ...] = ()


def read_item(
    row: Row, data_set: str | None = None, corpus: Mapping[str, Passage] | None = None
) -> MultiHopQuestion:
    """The question in `row`.

    Args:
        row: with the fields of its data set.
        data_set: whose shape it has; unset: found from the row.
        corpus: passages by title, for rows that only name theirs.

    Raises:
        InputError: the row has no known shape, or no question or answer.
    """
    shape = data_set or shape_of(row)
    question = _text(row.get("question")) or _text(_inside(row, "extra_info").get("question"))
    golds = tuple(_golds(row))
    if not question or not golds:
        raise InputError(f"This {shape} row holds no {'answer' if question else 'question'}.")
    answerable = row.get("answerable") is not False
    facts = MultiHopQuestion(
        question=question,
        golds=golds if answerable else NO_ANSWERS,
        data_set=shape,
        kind=_text(row.get("type")) or "unknown",
        answerable=answerable,
    )
    return SHAPES[shape](facts, row, corpus or {})


def why_unusable(item: MultiHopQuestion) -> str | None:
    """Returns why no answer to `item` could ever be right, or None if one can."""
    if not any(normalize_answer(gold) for gold in item.golds):
        return "the answer is empty in its normal form"
    if all(len(gold) > MAX_ANSWER_CHARACTERS for gold in item.golds):
        return "the answer is too long"
    return None


def shape_of(row: Row) -> str:
    """The name of the shape of `row`, as its fields show it.

    Raises:
        InputError: it has no known shape.
    """
    for name in ("own", "musique", "2wiki", "hotpotqa", "afm"):
        if _fits(name, row):
            return name
    raise InputError(
        f"The fields {', '.join(map(str, list(row)[:12])) or '(none)'} are those of no data set.",
        hint="A row needs at least a question and an answer (or golds, or golden_answers).",
    )


def _fits(shape: str, row: Row) -> bool:
    match shape:
        case "own":
            return "context_titles" in row or {"context", "question_decomposition"} <= row.keys()
        case "musique":
            return "paragraphs" in row
        case "2wiki":
            return "evidences" in row
        case "hotpotqa":
            return "context" in row or "supporting_facts" in row
    return "question" in row or "extra_info" in row


def _hotpotqa(item: MultiHopQuestion, row: Row, corpus: Mapping[str, Passage]) -> MultiHopQuestion:
    passages = tuple(_context(_decoded(row.get("context") or [])))
    supporting = tuple(_facts(_decoded(row.get("supporting_facts") or [])))
    hops = len(dict.fromkeys(title for title, _ in supporting)) or None
    return _with(item, passages=passages, supporting=supporting, hops=hops)


def _wiki2(item: MultiHopQuestion, row: Row, corpus: Mapping[str, Passage]) -> MultiHopQuestion:
    evidences = tuple(_evidences(_decoded(row.get("evidences") or [])))
    return _with(_hotpotqa(item, row, corpus), evidences=evidences)


def _musique(item: MultiHopQuestion, row: Row, corpus: Mapping[str, Passage]) -> MultiHopQuestion:
    passages, support = [], []
    for paragraph in _objects(row.get("paragraphs")):
        passage = Passage.from_data(paragraph)
        passages.append(passage)
        if paragraph.get("is_supporting") is True and item.answerable:
            support.append(passage.key)
    decomposition = tuple(
        (_text(step.get("question")), _text(step.get("answer")))
        for step in _objects(row.get("question_decomposition"))
    )
    found = re.match(r"(\d)hop", _text(row.get("id")))
    return _with(
        item,
        kind=_text(row.get("id")).partition("__")[0] or item.kind,
        passages=tuple(passages),
        support=tuple(support),
        decomposition=decomposition,
        hops=int(found[1]) if found else len(decomposition) or None,
    )


def _own(item: MultiHopQuestion, row: Row, corpus: Mapping[str, Passage]) -> MultiHopQuestion:
    item = _hotpotqa(item, row, corpus)
    titles = row.get("context_titles")
    passages = item.passages
    if isinstance(titles, list):
        unknown = [one for one in titles if not isinstance(one, str) or one not in corpus]
        if unknown:
            raise InputError(f"There is no passage {unknown[0]!r} in the corpus.")
        passages = tuple(corpus[title] for title in titles)
    decomposition = tuple(
        (_text(step.get("question")), _text(step.get("answer")))
        for step in _objects(row.get("question_decomposition"))
    )
    hops = row.get("hops")
    return _with(
        item,
        passages=passages,
        decomposition=decomposition,
        hops=hops if isinstance(hops, int) else item.hops,
    )


def _afm(item: MultiHopQuestion, row: Row, corpus: Mapping[str, Passage]) -> MultiHopQuestion:
    return item


SHAPES: dict[str, Callable[[MultiHopQuestion, Row, Mapping[str, Passage]], MultiHopQuestion]] = {
    "hotpotqa": _hotpotqa,
    "2wiki": _wiki2,
    "musique": _musique,
    "own": _own,
    "afm": _afm,
}


def _with(item: MultiHopQuestion, **facts: Any) -> MultiHopQuestion:
    return MultiHopQuestion(**{**vars(item), **facts})


def _golds(row: Row) -> Iterator[str]:
    """The answers of any shape, each once; they may be empty, but must be texts or numbers."""
    reward = _inside(row, "reward_model").get("ground_truth")
    target = reward.get("target") if isinstance(reward, dict) else reward
    sources = (
        row.get("answer"), row.get("golds"), row.get("answers"), row.get("golden_answers"),
        target, _inside(row, "extra_info").get("answer"),
    )  # fmt: skip
    first = next((source for source in sources if source is not None), None)
    if isinstance(first, bool):
        first = "yes" if first else "no"
    if isinstance(first, dict):  # SQuAD, TriviaQA
        first = [
            *_several(first.get("value")),
            *_several(first.get("text") or first.get("aliases")),
        ]
    aliases = [row.get("answer_aliases"), row.get("aliases")]
    values = [value for source in (first, *aliases) for value in _several(source)]
    yield from dict.fromkeys(_text(value) for value in values if _is_text(value))


def _several(value: object) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_text(value: object) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _text(value: object) -> str:
    return str(value).strip() if _is_text(value) else ""


def _inside(row: Row, key: str) -> dict[str, Any]:
    value = row.get(key)
    return value if isinstance(value, dict) else {}


def _decoded(value: object) -> object:
    """`value`, which some copies of the data sets hold as JSON in a text."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise InputError(f"A field of the row is not JSON: {error}") from error


def _objects(value: object) -> list[dict[str, Any]]:
    return [one for one in _several(value) if isinstance(one, dict)]


def _context(value: object) -> Iterator[Passage]:
    """The paragraphs of `{"title": [...], "sentences": [[...]]}` or of `[[title, [...]], ...]`, or
    of plain texts."""
    if isinstance(value, str) or (value and all(isinstance(one, str) for one in _several(value))):
        yield from (Passage.from_data({"title": "", "text": one}) for one in _several(value))
        return
    for title, sentences in _pairs(value, "title", "sentences", "content"):
        if not isinstance(title, str) or not isinstance(sentences, list):
            raise InputError("The row's context is not a list of titles and sentences.")
        yield Passage.from_data({"title": title, "sentences": sentences})


def _facts(value: object) -> Iterator[Fact]:
    facts: dict[Fact, None] = {}
    for title, number in _pairs(value, "title", "sent_id"):
        if not isinstance(title, str) or not isinstance(number, int):
            raise InputError("The row's supporting_facts are not titles and numbers.")
        facts[title.strip(), number] = None
    yield from facts


def _pairs(value: object, first: str, *second: str) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        name = next((name for name in second if name in value), second[0])
        columns = value.get(first), value.get(name)
        if not all(isinstance(column, list) for column in columns):
            raise InputError(f"The row has no {first} and {name} of the same length.")
        value = list(zip(*columns, strict=False))  # type: ignore[arg-type]
    for pair in _several(value):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise InputError(f"The row has something else than pairs of {first} and {second[0]}.")
        yield pair[0], pair[1]


def _evidences(value: object) -> Iterator[tuple[Triple, ...]]:
    """Triples, or for each one a list of all its forms."""
    names = ("fact", "relation", "entity")
    if isinstance(value, dict):
        value = list(zip(*(_several(value.get(name)) for name in names), strict=False))
    for entry in _several(value):
        parts = _several([entry.get(name) for name in names] if isinstance(entry, dict) else entry)
        nested = bool(parts) and all(isinstance(part, list | tuple) for part in parts)
        forms = parts if nested else [parts]
        yield tuple(_triple(form) for form in forms)


def _triple(parts: Sequence[object]) -> Triple:
    if len(parts) != 3 or not all(map(_is_text, parts)):
        raise InputError("The row's evidences are not triples.")
    return _text(parts[0]), _text(parts[1]), _text(parts[2])
