"""Conversations that solve a task, as good models would. Pure."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from envserver import Message, Task

from .agent import ROUTER
from .course import course_of
from .plans import Plan, Step, as_json, plan_of

_FIRST_STEPS = (("math", "solve", "problem"), ("code", "write", "task"), ("search", "query", "q"))


def demonstrate(task: Task, *, execute: bool) -> dict[str, list[Message]] | None:
    """Returns the messages of each agent, or None if the right plan is unknown.

    A query without a right plan is given a valid one, so that a run without an engine shows rows.

    An agent that the plan calls twice gives the answer of its last call both times.
    """
    text = right_answer(task)
    if text is None and task.hidden.get("any_plan") and task.hidden["answer"] is None:
        return {ROUTER: [_assistant(_some_plan(task))]}
    if text is None:
        return None
    said = {ROUTER: [_assistant(text)]}
    results = task.hidden["results"]
    for step in plan_of(task.hidden["plan"]).in_order() if execute else ():
        if step.id in results:
            said[step.agent] = [_finding(step.agent, results[step.id])]
    return said


def right_answer(task: Task) -> str | None:
    """Returns the right plan as the router writes it, or None if it is unknown."""
    gold: dict[str, Any] | None = task.hidden["target"] or task.hidden["plan"]
    return None if gold is None else json.dumps(gold, ensure_ascii=False)


def _some_plan(task: Task) -> str:
    """A plan of one step that gives the whole query to one of the agents."""
    query = task.public["query"]
    place = hashlib.sha256(query.encode()).digest()[0] % len(_FIRST_STEPS)
    agent, tool, argument = _FIRST_STEPS[place]
    step = Step("s1", agent, tool, {argument: query}, ())
    plan = Plan((step,), {}, "s1", f"The query is one for {agent}.")
    form = as_json(plan) if task.public["profile"] == "graph" else course_of(plan, query)
    return json.dumps(form, ensure_ascii=False)


def _finding(agent: str, result: str) -> Message:
    if agent == "code":
        return _assistant(f"```python\n{result}\n```")
    function = {"name": "finish", "arguments": json.dumps({"answer": result}, ensure_ascii=False)}
    call = {"id": "call_finish", "type": "function", "function": function}
    return {**_assistant(""), "tool_calls": [call]}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
