"""Converts rows and corpora. All texts in the answer count, whatever holds them, and its aliases.
Passages are objects, pairs or columns of titles and sentences or texts, or plain texts."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from envserver_environments.rows import (
    DataSets,
    FirstOption,
    Row,
    decoded,
    last_message,
    missing,
    objects_of,
    option_place,
    options_of,
    published,
    roles_of,
    rows_within,
    spelled,
    text_of,
    value_at,
)
from envserver_tools.retrieval import Passage, passages_from

from envserver import ConfigError, InputError, NotFoundError
from envserver.rows.sources import every_row

from .metrics import normalize_answer

DataSet = Literal["sample", "hotpotqa", "2wiki", "musique", "afm"]

NO_ANSWER = "noanswer"
"""The answer where the paragraphs do not contain it."""
NO_ANSWERS = (NO_ANSWER, "no answer", "unanswerable", "not answerable")

MAX_ANSWER_CHARACTERS = 400
ROLES, HUBS = published(__file__)
"""Names of each role in published sets; passages are those of all names, one after the other."""
_ANSWERS = (
    *("target", "value", "text", "answer", "spans", "number", "short_answers", "aliases"),
    *("normalized_aliases", "normalizedaliases"),
)
_TEXTS = (
    *("sentences", "text", "content", "passage_text", "wiki_context", "search_context"),
    "contexts",
)
_BOOLEANS = {"true": "yes", "false": "no"}
_YES_NO = {"yes": "yes", "1": "yes", "no": "no", "0": "no"}

Fact = tuple[str, int]
"""Title of a paragraph and number of a sentence, from 0."""
Triple = tuple[str, str, str]
"""Subject, relation, object."""


@dataclass(frozen=True)
class MultiHopQuestion:
    """A question with its answers."""

    question: str
    golds: tuple[str, ...]  # the answer and its aliases
    data_set: str  # hotpotqa, 2wiki, musique or own: whose measures it has
    kind: str = "unknown"  # the data set's name for it: bridge, comparison
    hops: int | None = None  # number of facts that must be found, if known
    answerable: bool = True
    passages: tuple[Passage, ...] = ()
    supporting: tuple[Fact, ...] = ()  # the sentences that answer it
    support: tuple[str, ...] = ()  # keys of passages, where these are judged (MuSiQue)
    evidences: tuple[tuple[Triple, ...], ...] = ()  # triples, each in all its forms
    decomposition: tuple[tuple[str, str], ...] = ()  # of each hop; `#1`: the first answer


def single_rows(row: Row) -> list[Row]:
    inner = next((name for name in ("qas", "qa_pairs") if name in row), "paragraphs.qas")
    return rows_within(row, inner)


def read_item(
    row: Row,
    corpus: Mapping[str, Passage] | None = None,
    columns: Mapping[str, str] | None = None,
    aliases: Mapping[str, Sequence[str]] | None = None,
    first: FirstOption = lambda: 0,
) -> MultiHopQuestion:
    columns = columns or {}
    found = roles_of(spelled(row), ROLES, columns)
    if isinstance(row.get("choice"), list):
        found.setdefault("options", row["choice"])
    if not (question := text_of(last_message(found.get("question")))):
        raise missing(row, ["question"])
    golds = _golds(row, found, aliases or {})
    if "options" in found and len(golds) == 1:
        options, _ = options_of(found["options"])
        place = option_place(found["answer"], options, first=first)
        if place is None:
            raise InputError(
                "The row's answer is not one of its options. If their numbers begin with 1, set"
                " --env.first_option 1."
            )
        question, golds = f"{question} Options: {'; '.join(options)}", (options[place],)
    if not golds:
        raise missing(row, ["answer"]) if "answer" not in found else InputError("It has no answer.")
    judged = [text for text in objects_of(row.get("paragraphs")) if "is_supporting" in text]
    supports = [text for text in judged if text["is_supporting"] and golds != NO_ANSWERS]
    supporting = tuple(_facts(decoded(found.get("supporting"))))
    evidences = tuple(_evidences(decoded(found.get("evidences"))))
    steps = objects_of(found.get("decomposition"))
    of_musique = re.match(r"((\d)hop\d*)__", text_of(found.get("id")))
    hops = found.get("hops")
    if not isinstance(hops, int):
        hops = int(of_musique[2]) if of_musique else 0
    return MultiHopQuestion(
        question=question,
        golds=golds,
        data_set=(
            "2wiki" if evidences else "musique" if judged else "hotpotqa" if supporting else "own"
        ),
        kind=of_musique[1] if of_musique else text_of(found.get("kind")) or "unknown",
        hops=hops or len({title for title, _ in supporting}) or len(steps) or None,
        answerable=golds != NO_ANSWERS,
        passages=tuple(_all_passages(row, columns, corpus or {})),
        supporting=supporting,
        support=tuple(Passage.from_data(text).key for text in supports),
        evidences=evidences,
        decomposition=tuple(
            (text_of(step.get("question")), text_of(step.get("answer"))) for step in steps
        ),
    )


def why_unusable(item: MultiHopQuestion) -> str | None:
    if not any(normalize_answer(gold) for gold in item.golds):
        return "the answer is empty in its normal form"
    if all(len(gold) > MAX_ANSWER_CHARACTERS for gold in item.golds):
        return "the answer is too long"
    return None


def _golds(
    row: Row, found: Mapping[str, Any], aliases: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """The right answers, or NO_ANSWERS for what paragraphs do not answer (MuSiQue, SQuAD 2)."""
    answers = decoded(row.get("answers"))
    is_empty = isinstance(answers, Mapping) and answers.get("text") == []
    marks = text_of(row.get("answerable")).lower(), text_of(row.get("is_impossible")).lower()
    if is_empty or marks[0] in ("no", "false") or marks[1] in ("yes", "true"):
        return NO_ANSWERS
    texts = [*_answers(found.get("answer"), row), *_answers(found.get("aliases"), row)]
    texts += aliases.get(text_of(row.get("answer_id")), ())
    yes_or_no = _BOOLEANS.get(texts[0].lower()) if len(texts) == 1 else None
    return tuple(dict.fromkeys([yes_or_no, *texts] if yes_or_no else texts))


def _answers(value: Any, row: Row) -> Iterator[str]:
    """The right answers in a value of any form; they may be empty."""
    value = decoded(value)
    if isinstance(value, list):
        for part in value:
            yield from _answers(part, row)
    elif isinstance(value, Mapping):
        fields = {str(name).lower(): part for name, part in value.items()}
        start, end = fields.get("start_token"), fields.get("end_token")
        if isinstance(start, int) and isinstance(end, int):  # NQ
            yield " ".join(text_of(row.get("document_text")).split(" ")[start:end])
        for name in _ANSWERS:
            yield from _answers(fields.get(name), row)
        several = fields.get("yes_no_answer")
        for mark in several if isinstance(several, list) else [several]:
            yield from filter(None, [_YES_NO.get(str(mark).lower())])
    elif text := text_of(value):
        yield text


def _all_passages(
    row: Row, columns: Mapping[str, str], corpus: Mapping[str, Passage]
) -> Iterator[Passage]:
    titles = row.get("context_titles")
    for title in map(text_of, titles if isinstance(titles, list) else ()):
        if title not in corpus:
            raise InputError(f"There is no passage {title!r} in the corpus.")
        yield corpus[title]
    for name in (columns["passages"],) if "passages" in columns else ROLES["passages"]:
        if (value := value_at(row, name)) is not None:
            yield from _passages(value, row)


def _passages(value: Any, row: Row) -> Iterator[Passage]:
    """Passages of any form: texts, objects, pairs of a title and sentences, or columns."""
    value = decoded(value)
    if isinstance(value, str):
        blocks = filter(str.strip, re.split(r"\n\s*\n", value))
        value = [{"title": text_of(row.get("title")), "text": block} for block in blocks]
    elif isinstance(value, Mapping):
        columns = [value[name] for name in _TEXTS if isinstance(value.get(name), list)]
        titles = value.get("title") or []
        if columns and isinstance(titles, list):
            pairs = zip_longest(titles, columns[0], fillvalue="")
            value = [[str(title), text] for title, text in pairs if text]
    for passage in value if isinstance(value, list) else [value]:
        match passage:
            case str():
                passage = {"title": "", "text": passage}
            case [str(title), str(text)]:
                passage = {"title": title, "text": text}
            case [str(title), list(sentences)]:
                passage = {"title": title, "sentences": sentences}
            case list() | tuple():
                raise InputError("The row's context is not a list of titles and sentences.")
            case Mapping():
                passage = passage.get("document") or passage.get("doc") or passage
        yield Passage.from_data(passage)


def _facts(value: Any) -> Iterator[Fact]:
    facts: dict[Fact, None] = {}
    for pair in _tuples(value, ("title", "sent_id")):
        match pair:
            case [str(title), int(number)]:
                facts[title.strip(), number] = None
            case _:
                raise InputError("The row's supporting_facts are not titles and numbers.")
    yield from facts


def _evidences(value: Any) -> Iterator[tuple[Triple, ...]]:
    for parts in _tuples(value, ("fact", "relation", "entity")):
        is_list = isinstance(parts, list | tuple) and bool(parts)
        nested = is_list and all(isinstance(part, list | tuple) for part in parts)
        yield tuple(_triple(form) for form in (parts if nested else [parts]))


def _tuples(value: Any, names: tuple[str, ...]) -> Iterator[Any]:
    columns: list[Any] = [value.get(name) for name in names] if isinstance(value, Mapping) else []
    if columns and all(isinstance(column, list) for column in columns):
        value = list(zip_longest(*columns))
    for entry in value if isinstance(value, list) else [] if value is None else [value]:
        yield [entry.get(name) for name in names] if isinstance(entry, Mapping) else entry


def _triple(parts: Any) -> Triple:
    texts = [text_of(part) for part in parts] if isinstance(parts, list | tuple) else []
    if len(texts) != 3 or not all(texts):
        raise InputError("The row's evidences are not triples.")
    return texts[0], texts[1], texts[2]


_FOLDER = Path(__file__).parent / "data"
SAMPLE = _FOLDER / "sample.jsonl"
OWN_CORPUS = _FOLDER / "corpus.jsonl"

DATA = DataSets(SAMPLE, HUBS)


def read_corpus(path: Path) -> Iterator[Passage]:
    """Passages of a JSONL file, one per line: `title`, and `sentences`, `text` or `contents`."""
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
    """Names of answers by `Q_id`, as in 2Wiki's `id_aliases.json`."""
    found = [] if path is None else list(every_row(path))
    if not all("Q_id" in row for row in found):
        raise ConfigError(f"{path} has no names by Q_id, as 2Wiki's id_aliases.json has them.")
    return {row["Q_id"]: [*row.get("aliases", []), *row.get("demonyms", [])] for row in found}


@functools.cache
def own_passages() -> Mapping[str, Passage]:
    """The passages of the sample by their titles, of which no two are the same."""
    return {passage.title: passage for passage in read_corpus(OWN_CORPUS)}


def different(passages: Iterable[Passage]) -> Iterator[Passage]:
    seen: set[str] = set()
    for passage in passages:
        if passage.key not in seen:
            seen.add(passage.key)
            yield passage


def read_context(path: Path) -> list[Passage]:
    """Passages for a person's question: a corpus, or texts with blank lines between them, of which
    a first line that begins with `#` is a title."""
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
