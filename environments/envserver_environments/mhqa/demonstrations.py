"""Conversations that solve a task, as a good model would. Pure."""

from __future__ import annotations

import json
from typing import Any

from envserver import Message, Task

from .agent import MAX_HOPS, Mode, numbered_list, substituted


def demonstrate(task: Task, mode: Mode) -> list[Message] | None:
    """Returns the assistant messages, one per turn, or None if the answer is unknown."""
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
    """Returns the search queries in order: the sub-questions, else the titles of the evidence."""
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
        _call(f"call_{number}", "search", _thought(task, number, plan), query=query[:300])
        for number, query in enumerate(asked, start=1)
    ]
    facts = [[_title(task, name), number] for name, number in task.hidden["supporting"]]
    answer = str(task.hidden["golds"][0])
    rest: dict[str, Any] = {"supporting_facts": facts} if facts else {}
    if task.hidden["evidences"]:
        rest["evidence"] = [ways[0] for ways in task.hidden["evidences"]]
    last = _call("call_finish", "finish", f"So the answer is {answer}.", answer=answer, **rest)
    return [*searches, last]


def _with_texts(task: Task) -> list[Message]:
    asked = queries(task)
    plan = "; ".join(asked)
    messages = []
    for number, query in enumerate(asked, start=1):
        call = json.dumps({"tool": "search", "args": {"query": query[:300]}}, ensure_ascii=False)
        messages.append(_text(f"THOUGHT: {_thought(task, number, plan)}\nTOOL_CALL: {call}"))
    return [*messages, _text(f"THOUGHT: Now I know.\nFINAL: {task.hidden['golds'][0]}")]


def _with_tags(task: Task) -> list[Message]:
    asked = queries(task)
    plan = "\n".join(asked)
    messages = []
    for number, query in enumerate(asked, start=1):
        tag = "plan" if number == 1 else "reflection"
        thought = f"<{tag}>{_thought(task, number, plan)}</{tag}>"
        messages.append(_text(f"{thought}\n<wiki_search>{query}</wiki_search>"))
    return [*messages, _text(f"<answer>{task.hidden['golds'][0]}</answer>")]


def _by_script(task: Task) -> list[Message]:
    gold = str(task.hidden["golds"][0])
    steps = task.hidden["decomposition"][:MAX_HOPS] or [(task.public["question"], gold)]
    plan = "\n".join(f"{number}. {step[0]}" for number, step in enumerate(steps, start=1))
    notes = [_text(f"The passages say it.\nAnswer: {answer}") for _, answer in steps]
    assert len(numbered_list(plan)) == len(steps)
    return [_text(plan), *notes, _text(f"Answer: {gold}")]


def _thought(task: Task, number: int, plan: str) -> str:
    """Returns the text before the search of that number."""
    if number == 1:
        return f"I must find:\n{plan}"
    steps = task.hidden["decomposition"]
    return f"It is {steps[number - 2][1]}." if steps else "One more fact is missing."


def _title(task: Task, name: str | int) -> str:
    passages = task.public["passages"]
    return str(passages[name]["title"]) if isinstance(name, int) else name


def _text(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _call(call_id: str, tool: str, content: str, **arguments: Any) -> Message:
    function = {"name": tool, "arguments": json.dumps(arguments, ensure_ascii=False)}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}
