"""Answers with a known reward: correct ones in every accepted form, and cheats. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from envserver_tools.retrieval import passages_from

from envserver import KnownResult, Result, Task

from .data_sets import MAX_ANSWER_CHARACTERS
from .metrics import answer_measure, normalize_answer
from .scoring import F1_SHARE, why_refused

OTHER = "Qwxzl"
"""A word that no gold has."""


def known_answers(task: Task, support_weight: float) -> Iterator[KnownResult]:
    """Returns the known results of any task here."""
    golds = [str(gold) for gold in task.hidden["golds"]]
    yield from _right_ones(task, golds, support_weight)
    yield from _nothing_said(golds[0])
    yield from _several_said(golds)
    for name, answer in _near_ones(task, golds[0]):
        if not answer_measure(answer, golds).em:
            most = 0.0 if why_refused(answer, golds) else F1_SHARE
            yield KnownResult(name, _result(answer), most=most)


def _right_ones(task: Task, golds: list[str], support_weight: float) -> Iterator[KnownResult]:
    gold = golds[0]
    least = 1.0 - support_weight
    whole = _output(gold) | _resting_on(task)
    yield KnownResult("gold, with what it rests on", Result(output=whole), least=1.0, most=1.0)
    for alias in dict.fromkeys(golds):
        if normalize_answer(alias):
            yield KnownResult("gold or alias", _result(alias), least=least, most=1.0)
    forms = {
        "gold, between tags": f"So it is <answer>{gold}</answer>.",
        "gold, as JSON": f'{{"answer": "{gold}"}}',
        "gold, after FINAL": f"THOUGHT: I know.\nFINAL: {gold}",
        "gold, in a box": f"It is \\boxed{{{gold}}}",
        "gold, in a line": f"I know it.\nFinal answer: {gold}",
        "gold, after thoughts": f"<think><answer>{OTHER}</answer></think><answer>{gold}</answer>",
    }
    for name, text in forms.items():
        if not set(gold) & set('"\\{}<>\n'):
            yield KnownResult(name, _text(text), least=least, most=1.0)
    yield KnownResult("gold, in other letters", _result(gold.upper()), least=least, most=1.0)
    yield KnownResult("gold, with an article", _result(f"The {gold}."), least=least, most=1.0)


def _nothing_said(gold: str) -> Iterator[KnownResult]:
    for name, answer in (("no answer", None), ("empty answer", ""), ("only an article", "The.")):
        yield KnownResult(name, _result(answer))
    yield KnownResult("small words", _result("it was in and of this"))
    yield KnownResult("gold, only thought", _text(f"<think><answer>{gold}</answer></think>"))
    yield KnownResult("gold, thoughts without end", _text(f"<think><answer>{gold}</answer>"))
    yield KnownResult("gold, not handed in", _text(f"I read about {gold}"))
    yield KnownResult("gold in a list", _text(f'{{"answer": ["{gold}"]}}'))
    yield KnownResult("gold, in an open tag", _text(f"<answer>{gold}"))
    yield KnownResult(
        "gold, cut off", Result(output=_output(gold), finish_reason="length", truncated=True)
    )


def _several_said(golds: list[str]) -> Iterator[KnownResult]:
    gold = golds[0]
    answers = {
        "two answers, or": f"{gold} or {OTHER}",
        "two answers, OR": f"{OTHER}, OR {gold}",
        "two answers, bar": f"{gold}|{OTHER}",
        "two answers, semicolon": f"{OTHER}; {gold}",
        "two answers, lines": f"{gold}\n{OTHER}",
        "yes or no": "yes or no",
        "far too long": f"{OTHER} " * MAX_ANSWER_CHARACTERS + gold,
    }
    for name, answer in answers.items():
        if why_refused(answer, golds):
            yield KnownResult(name, _result(answer))
    last = f"<answer>{gold}</answer> no, <answer>{OTHER}</answer>"
    yield KnownResult("gold, then another answer", _text(last))


def _near_ones(task: Task, gold: str) -> Iterator[tuple[str, str]]:
    """Answers that are not the right one, but share words with it."""
    yield "two answers, and", f"{gold} and {OTHER}"
    yield "two answers, comma", f"{gold}, {OTHER}"
    yield "two answers, slash", f"{gold} / {OTHER}"
    yield "in a sentence", f"The answer to this question is clearly {gold}"
    yield "in a long sentence", f"{OTHER} " * 12 + gold
    yield "twice", f"{gold} {gold}"
    yield "yes and no", "yes no"
    yield "yes", "yes"
    yield "no", "no"
    yield "given up", "noanswer"
    yield "the question", str(task.public["question"])
    for passage in passages_from(task.public["passages"]):
        yield "a title", passage.title
        yield "a passage", passage.text[:MAX_ANSWER_CHARACTERS]
        for sentence in passage.sentences:
            yield "a sentence", sentence


def _resting_on(task: Task) -> dict[str, Any]:
    """Returns the evidence of the right answer, as the agent returns it."""
    passages = task.public["passages"]
    facts = [
        [passages[name]["title"] if isinstance(name, int) else name, number]
        for name, number in task.hidden["supporting"]
    ]
    evidence = [ways[0] for ways in task.hidden["evidences"]]
    return {"facts": facts, "passages": task.hidden["support"], "evidence": evidence}


def _result(answer: str | None) -> Result:
    return Result(output=_output(answer))


def _text(text: str) -> Result:
    return Result(output=_output(None, text))


def _output(answer: str | None, text: str = "") -> dict[str, Any]:
    """Returns an output of the agent."""
    return {"answer": answer, "text": text, "facts": [], "passages": [], "evidence": []}
