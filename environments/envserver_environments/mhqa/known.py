"""Answers with a known reward, and conversations that solve a task. Pure."""

from __future__ import annotations

from collections.abc import Iterator

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
    yield _KNOWN.wrong("gold, only thought", text=f"<think><answer>{gold}</answer></think>")
    yield _KNOWN.wrong("gold, thoughts without end", text=f"<think><answer>{gold}</answer>")
    yield _KNOWN.wrong("gold, not handed in", text=f"I read about {gold}")
    yield _KNOWN.wrong("gold in a list", text=f'{{"answer": ["{gold}"]}}')
    yield _KNOWN.wrong("gold, in an open tag", text=f"<answer>{gold}")
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
    facts = supporting_facts(task)
    evidence = [ways[0] for ways in task.hidden["evidences"]]
    return {"facts": facts, "passages": task.hidden["support"], "evidence": evidence}


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
    titles = (title for title, _ in supporting_facts(task))
    return [str(task.public["question"]), *dict.fromkeys(titles)]


def _with_tools(task: Task) -> list[Message]:
    hops = queries(task)
    plan = "\n".join(f"{number}. {query}" for number, query in enumerate(hops, start=1))
    searches = [
        call_message("search", _thought(task, number, plan), query=query[:300])
        for number, query in enumerate(hops, start=1)
    ]
    facts = supporting_facts(task)
    answer = str(task.hidden["golds"][0])
    rest: Json = {"supporting_facts": facts} if facts else {}
    if task.hidden["evidences"]:
        rest["evidence"] = [ways[0] for ways in task.hidden["evidences"]]
    last = call_message("finish", f"So the answer is {answer}.", answer=answer, **rest)
    return [*searches, last]


def _with_texts(task: Task) -> list[Message]:
    hops = queries(task)
    plan = "; ".join(hops)
    messages = []
    for number, query in enumerate(hops, start=1):
        thought = _thought(task, number, plan)
        messages.append(written_call("search", thought, query=query[:300]))
    return [*messages, text_message(f"THOUGHT: Now I know.\nFINAL: {task.hidden['golds'][0]}")]


def _with_tags(task: Task) -> list[Message]:
    hops = queries(task)
    plan = "\n".join(hops)
    messages = []
    for number, query in enumerate(hops, start=1):
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
