"""Answers with a known reward, and conversations that solve a task. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from envserver_environments.demonstrations import call_message, text_message
from envserver_tools.retrieval import passages_from

from envserver import KnownResult, Message, Result, Task

from .agent import MAX_HOPS, Mode, numbered_list, substituted
from .data_sets import MAX_ANSWER_CHARACTERS
from .metrics import answer_measure, normalize_answer
from .scoring import F1_SHARE, why_refused

OTHER = "Qwxzl"
"""A word that no gold has."""


def known_answers(task: Task, support_weight: float) -> Iterator[KnownResult]:
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
            yield KnownResult(name, _text_result(text), least=least, most=1.0)
    yield KnownResult("gold, in other letters", _result(gold.upper()), least=least, most=1.0)
    yield KnownResult("gold, with an article", _result(f"The {gold}."), least=least, most=1.0)


def _nothing_said(gold: str) -> Iterator[KnownResult]:
    for name, answer in (("no answer", None), ("empty answer", ""), ("only an article", "The.")):
        yield KnownResult(name, _result(answer))
    yield KnownResult("small words", _result("it was in and of this"))
    yield KnownResult("gold, only thought", _text_result(f"<think><answer>{gold}</answer></think>"))
    yield KnownResult("gold, thoughts without end", _text_result(f"<think><answer>{gold}</answer>"))
    yield KnownResult("gold, not handed in", _text_result(f"I read about {gold}"))
    yield KnownResult("gold in a list", _text_result(f'{{"answer": ["{gold}"]}}'))
    yield KnownResult("gold, in an open tag", _text_result(f"<answer>{gold}"))
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
    yield KnownResult("gold, then another answer", _text_result(last))


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


def _resting_on(task: Task) -> dict[str, Any]:
    passages = task.public["passages"]
    facts = [
        [passages[name]["title"] if isinstance(name, int) else name, number]
        for name, number in task.hidden["supporting"]
    ]
    evidence = [ways[0] for ways in task.hidden["evidences"]]
    return {"facts": facts, "passages": task.hidden["support"], "evidence": evidence}


def _result(answer: str | None) -> Result:
    return Result(output=_output(answer))


def _text_result(text: str) -> Result:
    return Result(output=_output(None, text))


def _output(answer: str | None, text: str = "") -> dict[str, Any]:
    return {"answer": answer, "text": text, "facts": [], "passages": [], "evidence": []}


def demonstrate(task: Task, mode: Mode) -> list[Message] | None:
    if not task.hidden["golds"]:
        return None
    match mode:
        case "tools":
            return _with_tools(task)
        case "text":
            return _with_texts(task)
        case "tags":
            return _with_tags(task)
        case "scripted":
            return _by_script(task)


def queries(task: Task) -> list[str]:
    steps = task.hidden["decomposition"]
    answers = [answer for _, answer in steps]
    if steps:
        return [substituted(question, answers) for question, _ in steps]
    titles = (_title(task, name) for name, _ in task.hidden["supporting"])
    return [str(task.public["question"]), *dict.fromkeys(titles)]


def _with_tools(task: Task) -> list[Message]:
    asked = queries(task)
    plan = "\n".join(f"{number}. {query}" for number, query in enumerate(asked, start=1))
    searches = [
        call_message("search", _thought(task, number, plan), query=query[:300])
        for number, query in enumerate(asked, start=1)
    ]
    facts = [[_title(task, name), number] for name, number in task.hidden["supporting"]]
    answer = str(task.hidden["golds"][0])
    rest: dict[str, Any] = {"supporting_facts": facts} if facts else {}
    if task.hidden["evidences"]:
        rest["evidence"] = [ways[0] for ways in task.hidden["evidences"]]
    last = call_message("finish", f"So the answer is {answer}.", answer=answer, **rest)
    return [*searches, last]


def _with_texts(task: Task) -> list[Message]:
    asked = queries(task)
    plan = "; ".join(asked)
    messages = []
    for number, query in enumerate(asked, start=1):
        call = json.dumps({"tool": "search", "args": {"query": query[:300]}}, ensure_ascii=False)
        messages.append(text_message(f"THOUGHT: {_thought(task, number, plan)}\nTOOL_CALL: {call}"))
    return [*messages, text_message(f"THOUGHT: Now I know.\nFINAL: {task.hidden['golds'][0]}")]


def _with_tags(task: Task) -> list[Message]:
    asked = queries(task)
    plan = "\n".join(asked)
    messages = []
    for number, query in enumerate(asked, start=1):
        tag = "plan" if number == 1 else "reflection"
        thought = f"<{tag}>{_thought(task, number, plan)}</{tag}>"
        messages.append(text_message(f"{thought}\n<wiki_search>{query}</wiki_search>"))
    return [*messages, text_message(f"<answer>{task.hidden['golds'][0]}</answer>")]


def _by_script(task: Task) -> list[Message]:
    gold = str(task.hidden["golds"][0])
    steps = task.hidden["decomposition"][:MAX_HOPS] or [(task.public["question"], gold)]
    plan = "\n".join(f"{number}. {step[0]}" for number, step in enumerate(steps, start=1))
    notes = [text_message(f"The passages say it.\nAnswer: {answer}") for _, answer in steps]
    assert len(numbered_list(plan)) == len(steps)
    return [text_message(plan), *notes, text_message(f"Answer: {gold}")]


def _thought(task: Task, number: int, plan: str) -> str:
    if number == 1:
        return f"I must find:\n{plan}"
    steps = task.hidden["decomposition"]
    return f"It is {steps[number - 2][1]}." if steps else "One more fact is missing."


def _title(task: Task, name: str | int) -> str:
    passages = task.public["passages"]
    return str(passages[name]["title"]) if isinstance(name, int) else name
