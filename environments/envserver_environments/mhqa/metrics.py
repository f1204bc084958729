"""The metrics of the multi-hop data sets, computed as their official programs do. Pure.

    Hotpot     hotpot_evaluate_v1.py: answer, supporting facts, joint
    2Wiki      2wikimultihop_evaluate_v1.1.py: the same over aliases, and evidence triples
    MuSiQue    evaluate_v1.0.py: answer, supporting paragraphs, sufficiency of pairs

The normal form is lower case, then without punctuation, then without articles, then with single
spaces: "3.5" is "35"; accents, and dashes and quotes outside of ASCII, stay.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SPECIAL = ("yes", "no", "noanswer")
"""Answers that have no partial credit (not in MuSiQue)."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)

Fact = tuple[object, object]
Triple = tuple[str, ...]


@dataclass(frozen=True)
class Measure:
    """Exact match (0 or 1), F1, precision and recall."""

    em: float = 0.0
    f1: float = 0.0
    precision: float = 0.0
    recall: float = 0.0


def normalize_answer(text: str) -> str:
    plain = _ARTICLES.sub(" ", _without_punctuation(text.lower()))
    return " ".join(plain.split())


def answer_measure(prediction: str, golds: Iterable[str]) -> Measure:
    """Hotpot's measure of an answer; each number is the best over `golds`, as in 2Wiki."""
    said = normalize_answer(prediction)
    return _best(_hotpot(said, normalize_answer(gold)) for gold in golds)


def musique_answer_measure(prediction: str, golds: Iterable[str]) -> Measure:
    """MuSiQue's: two empty answers are the same, and yes and no are words like others."""
    said = normalize_answer(prediction)
    return _best(_musique(said, normalize_answer(gold)) for gold in golds)


def fact_measure(prediction: Iterable[Fact], gold: Iterable[Fact]) -> Measure:
    """Hotpot's measure of supporting facts; nothing for nothing has em 1 and f1 0."""
    said, right = set(prediction), set(gold)
    return _counted(len(said & right), len(said), len(right))


def wiki2_fact_measure(prediction: Iterable[Fact], gold: Iterable[Fact]) -> Measure:
    """2Wiki's: titles in lower case, after each different fact was counted."""
    said = [_lower(fact) for fact in set(prediction)]
    right = [_lower(fact) for fact in set(gold)]
    found = sum(fact in right for fact in said)
    kept = sum(fact in said for fact in right)
    precision, recall = _share(found, len(said)), _share(found, found + len(right) - kept)
    return _measured(found == len(said) and kept == len(right), precision, recall)


def support_measure(prediction: Iterable[object], gold: Iterable[object]) -> Measure:
    """MuSiQue's measure of supporting paragraphs, by number (also as text); two empty lists are
    equal."""
    said, right = set(map(_number, prediction)), set(map(_number, gold))
    if not said and not right:
        return Measure(1.0, 1.0, 1.0, 1.0)
    return _counted(len(said & right), len(said), len(right))


def evidence_measure(
    prediction: Iterable[Sequence[str]], gold: Iterable[Iterable[Sequence[str]]]
) -> Measure:
    """2Wiki's measure of evidence triples, each gold one in all its accepted forms."""
    said = {_plain_triple(triple) for triple in prediction}
    right = [{_plain_triple(way) for way in ways} for ways in gold]
    found = sum(any(triple in ways for ways in right) for triple in said)
    return _counted(found, len(said), len(right))


def joint_measure(*parts: Measure) -> Measure:
    em = precision = recall = 1.0
    for part in parts:
        em, precision, recall = em * part.em, precision * part.precision, recall * part.recall
    return _measured(em, precision, recall)


def _hotpot(said: str, gold: str) -> Measure:
    em = float(said == gold)
    if not em and (said in SPECIAL or gold in SPECIAL):
        return Measure()
    return _of_words(said.split(), gold.split(), em)


def _musique(said: str, gold: str) -> Measure:
    em = float(said == gold)
    if not said or not gold:
        return Measure(em, em, em, em)
    return _of_words(said.split(), gold.split(), em)


def _of_words(said: list[str], gold: list[str], em: float) -> Measure:
    same = (Counter(said) & Counter(gold)).total()
    if not same:
        return Measure(em)
    return _measured(em, same / len(said), same / len(gold))


def _best(measures: Iterable[Measure]) -> Measure:
    """The best of each number by itself; nothing where there is no gold."""
    columns = list(zip(*((m.em, m.f1, m.precision, m.recall) for m in measures), strict=True))
    return Measure(*map(max, columns)) if columns else Measure()


def _counted(found: int, said: int, gold: int) -> Measure:
    return _measured(found == said == gold, _share(found, said), _share(found, gold))


def _measured(em: float, precision: float, recall: float) -> Measure:
    f1 = _share(2 * precision * recall, precision + recall)
    return Measure(float(em), f1, precision, recall)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _lower(fact: Fact) -> Fact:
    title, sentence = fact
    return (title.lower() if isinstance(title, str) else title), sentence


def _number(value: object) -> object:
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d+\s*", value):
        return int(value)
    return value


def _plain_triple(triple: Sequence[str]) -> Triple:
    return tuple(" ".join(_without_punctuation(part.lower()).split()) for part in triple)


def _without_punctuation(text: str) -> str:
    return text.translate(_NO_PUNCTUATION)
