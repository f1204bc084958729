"""Answers with a known reward, and conversations that solve a task. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from envserver_environments.demonstrations import (
    Known,
    call_message,
    text_message,
    written_call,
)
from envserver_records.tasks import Json
from envserver_tools.retrieval import passages_from

from envserver import KnownResult, Message, Task

from .agent import MAX_HOPS, Mode, numbered_list, substituted
from .data_sets import MAX_ANSWER_CHARACTERS
from .metrics import answer_measure, normalize_answer
from .scoring import F1_SHARE, supporting_facts, why_refused

OTHER = "Qwxzl"
"""A word that no gold has."""
_KNOWN = Known(answer=None, text="", facts=[], passages=[], evidence=[])


def known_answers(task: Task, support_weight: float) -> Iterator[KnownResult]:
    golds = [str(gold) for gold in task.hidden["golds"]]
    yield from _right_ones(task, golds, support_weight)
    yield from _nothing_said(golds[0])
    yield from _several_said(golds)
    for name, answer in _near_ones(task, golds[0]):
        if not answer_measure(answer, golds).em:
            most = 0.0 if why_refused(answer, golds) else F1_SHARE
            yield _KNOWN.wrong(name, most, answer=answer)


def _right_ones(task: Task, golds: list[str], support_weight: float) -> Iterator[KnownResult]:
    gold = golds[0]
    least = 1.0 - support_weight
    yield _KNOWN.right("gold, with what it rests on", answer=gold, **_resting_on(task))
    for alias in dict.fromkeys(golds):
        if normalize_answer(alias):
            yield _KNOWN.right("gold or alias", least, answer=alias)
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
            yield _KNOWN.right(name, least, text=text)
    yield _KNOWN.right("gold, in other letters", least, answer=gold.upper())
    yield _KNOWN.right("gold, with an article", least, answer=f"The {gold}.")


def _nothing_said(gold: str) -> Iterator[KnownResult]:
    for name, answer in (("no answer", None), ("empty answer", ""), ("only an article", "The.")):
        yield _KNOWN.wrong(name, answer=answer)
    yield _KNOWN.wrong("small words", answer="it was in and of this")
    texts = {
        "gold, only thought": f"<think><answer>{gold}</answer></think>",
        "gold, thoughts without end": f"<think><answer>{gold}</answer>",
        "gold, not handed in": f"I read about {gold}",
        "gold in a list": f'{{"answer": ["{gold}"]}}',
        "gold, in an open tag": f"<answer>{gold}",
    }
    for name, text in texts.items():
        yield _KNOWN.wrong(name, text=text)
    yield _KNOWN.cut_off("gold, cut off", answer=gold)


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
            yield _KNOWN.wrong(name, answer=answer)
    last = f"<answer>{gold}</answer> no, <answer>{OTHER}</answer>"
    yield _KNOWN.wrong("gold, then another answer", text=last)


def _near_ones(task: Task, gold: str) -> Iterator[tuple[str, str]]:
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


def _resting_on(task: Task) -> Json:
    passages = task.hidden["support"]
    return {"facts": supporting_facts(task), "passages": passages, "evidence": _evidence(task)}


def _evidence(task: Task) -> list[Any]:
    return [ways[0] for ways in task.hidden["evidences"]]


def demonstrate(task: Task, mode: Mode) -> list[Message] | None:
    if not task.hidden["golds"]:
        return None
    gold, hops = str(task.hidden["golds"][0]), queries(task)
    match mode:
        case "tools":
            plan = "\n".join(f"{number}. {query}" for number, query in enumerate(hops, start=1))
            searches = [
                call_message("search", thought, query=query[:300])
                for thought, query in _explained(task, hops, plan)
            ]
            facts = {"supporting_facts": supporting_facts(task), "evidence": _evidence(task)}
            named = {name: value for name, value in facts.items() if value}
            last = call_message("finish", f"So the answer is {gold}.", answer=gold, **named)
            return [*searches, last]
        case "text":
            searches = [
                written_call("search", thought, query=query[:300])
                for thought, query in _explained(task, hops, "; ".join(hops))
            ]
            return [*searches, text_message(f"THOUGHT: Now I know.\nFINAL: {gold}")]
        case "tags":
            tags = ["plan", *["reflection"] * len(hops)]
            searches = [
                text_message(f"<{tag}>{thought}</{tag}>\n<wiki_search>{query}</wiki_search>")
                for tag, (thought, query) in zip(
                    tags, _explained(task, hops, "\n".join(hops)), strict=False
                )
            ]
            return [*searches, text_message(f"<answer>{gold}</answer>")]
        case "scripted":
            return _by_script(task, gold)


def queries(task: Task) -> list[str]:
    steps = task.hidden["decomposition"]
    answers = [answer for _, answer in steps]
    if steps:
        return [substituted(question, answers) for question, _ in steps]
    titles = (title for title, _ in supporting_facts(task))
    return [str(task.public["question"]), *dict.fromkeys(titles)]


def _by_script(task: Task, gold: str) -> list[Message]:
    steps = task.hidden["decomposition"][:MAX_HOPS] or [(task.public["question"], gold)]
    plan = "\n".join(f"{number}. {step[0]}" for number, step in enumerate(steps, start=1))
    notes = [text_message(f"The passages say it.\nAnswer: {answer}") for _, answer in steps]
    assert len(numbered_list(plan)) == len(steps)
    return [text_message(plan), *notes, text_message(f"Answer: {gold}")]


def _explained(task: Task, hops: list[str], plan: str) -> Iterator[tuple[str, str]]:
    """Each query behind a thought: first the plan, then what the query before has found."""
    notes = [f"It is {answer}." for _, answer in task.hidden["decomposition"]]
    missing = ["One more fact is missing."] * len(hops)
    return zip([f"I must find:\n{plan}", *(notes or missing)], hops, strict=False)
