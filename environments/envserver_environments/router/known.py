"""Answers whose reward is known (right plans in every form that counts, broken ones, cheats), and
conversations that solve a task. Pure."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from envserver_environments.demonstrations import Known, call_message, text_message
from envserver_records.tasks import Json

from envserver import KnownResult, Message, Task

from .agent import ROUTER
from .course import (
    COMMANDS,
    MAX_STEPS,
    TOOLS,
    Plan,
    Step,
    as_json,
    course_of,
    first_tool_step,
    plan_of,
)
from .scoring import FORM_SHARE, PLAN_SHARE, REPAIR_FACTOR, likeness

_KNOWN = Known(plan="", program=None, repaired=False, cut_off=False, executed=False, answer=None)


def demonstrate(task: Task, *, execute: bool) -> dict[str, list[Message]] | None:
    """The messages of each agent, or None if the right plan is unknown; a query that takes any plan
    is given a valid one. An agent that the plan calls twice gives its last answer both times."""
    text = right_answer(task)
    if text is None and task.hidden.get("any_plan") and task.hidden["answer"] is None:
        return {ROUTER: [text_message(_some_plan(task))]}
    if text is None:
        return None
    said = {ROUTER: [text_message(text)]}
    results = task.hidden["results"]
    for step in plan_of(task.hidden["plan"]).in_order() if execute else ():
        if step.id in results:
            said[step.agent] = [_finding(step.agent, results[step.id])]
    return said


def right_answer(task: Task) -> str | None:
    gold: Json | None = task.hidden["target"] or task.hidden["plan"]
    return None if gold is None else json.dumps(gold, ensure_ascii=False)


def _some_plan(task: Task) -> str:
    query = task.public["query"]
    agent = [*COMMANDS][hashlib.sha256(query.encode()).digest()[0] % len(COMMANDS)]
    step = first_tool_step("s1", agent, query)
    plan = Plan((step,), {}, "s1", f"The query is one for {agent}.")
    form = as_json(plan) if task.public["profile"] == "graph" else course_of(plan, query)
    return json.dumps(form, ensure_ascii=False)


def _finding(agent: str, result: str) -> Message:
    if agent == "code":
        return text_message(f"```python\n{result}\n```")
    return call_message("finish", answer=result)


ALMOST = 0.96
"""Maximum reward of any plan but the right one."""

CONSTANT = (("search", "math", "code"), ("search", "math"), ("code",), ("search",))


def known_answers(task: Task, *, execute: bool) -> Iterator[KnownResult]:
    gold = right_answer(task)
    if gold is None:
        return
    runs = execute and task.hidden["answer"] is not None
    right = _right_output(task) if runs else {}
    yield _known("gold", gold, 1.0, **right)
    yield _known("gold, after thoughts", f"<think>{{}} or so</think>\n{gold}", 1.0, **right)
    yield _known("gold, indented", json.dumps(json.loads(gold), indent=2), 1.0, **right)
    yield _known("gold, repaired", gold, REPAIR_FACTOR, repaired=True, **right)
    if runs:
        yield _known("gold, run to a wrong answer", gold, PLAN_SHARE, answer="0.123", program="")
        yield _known("gold, not run", gold, PLAN_SHARE)
    for name, text in _unreadable(gold):
        yield _known(name, text, 0.0, **right)
    yield _KNOWN.wrong("gold, cut off", plan=gold, cut_off=True, **right)
    for name, change in _BROKEN[task.public["profile"]].items():
        yield _known(name, json.dumps(_changed(gold, change)), 0.0, **right)
    if not runs:
        yield from _other_plans(task)


def _unreadable(gold: str) -> Iterator[tuple[str, str]]:
    yield "in a fence", f"```json\n{gold}\n```"
    yield "prose before it", f"Here is the plan: {gold}"
    yield "prose behind it", f"{gold}\nI hope this helps."
    yield "only thought", f"<think>{gold}</think>"
    yield "thoughts without end", f"<think>So: {gold}"
    yield "twice", f"{gold}\n{gold}"
    yield "in a list", f"[{gold}]"
    yield "as a text", json.dumps(gold)
    yield "a comma behind it", f"{gold[:-1]},}}"
    yield "a key twice", f"{gold[:-1]}, {gold[1:]}"
    yield "NaN in it", f'{gold[:-1]}, "x": NaN}}'
    yield "cut off without a word", gold[:-2]


def _circular(plan: Json) -> None:
    step = plan["steps"][0]
    step["depends_on"] = [step["id"]]
    plan["handoffs"].append({"from": step["id"], "to": step["id"], "payload": "itself"})


_BROKEN: dict[str, dict[str, Callable[[Json], Any]]] = {
    "graph": {
        "another key": lambda plan: plan.update(confidence=1.0),
        "a key is missing": lambda plan: plan.pop("rationale"),
        "no steps": lambda plan: plan.update(steps=[], handoffs=[]),
        "nine steps": lambda plan: plan.update(steps=plan["steps"][:1] * (MAX_STEPS + 1)),
        "the same id twice": lambda plan: plan["steps"].append(plan["steps"][0]),
        "a step that nothing uses": lambda plan: plan["steps"].append(
            {**plan["steps"][0], "id": "unused", "depends_on": []}
        ),
        "a step that waits for itself": _circular,
        "a tool that is none": lambda plan: plan["steps"][0].update(tool="browse"),
        "a step without arguments": lambda plan: plan["steps"][0].update(args={}),
        "a final step that is none": lambda plan: plan.update(final_step="s99"),
        "a handoff too many": lambda plan: plan["handoffs"].append(
            {"from": "s8", "to": plan["final_step"], "payload": "more"}
        ),
    },
    "coursegpt": {
        "another key": lambda plan: plan.update(confidence=1.0),
        "a key is missing": lambda plan: plan.pop("route_rationale"),
        "no steps": lambda plan: plan.update(route_plan=[]),
        "a tool that is none": lambda plan: plan["route_plan"].append("/browser(open it)"),
        "a search without a mode": lambda plan: plan.update(
            route_plan=['/general-search(query="What is asked")']
        ),
        "a command twice in a row": lambda plan: plan["route_plan"].append(plan["route_plan"][-1]),
        "a step without arguments": lambda plan: plan.update(route_plan=["/math()"]),
    },
}


def _other_plans(task: Task) -> Iterator[KnownResult]:
    """Valid plans that are not the right one, and the right one in other words."""
    gold = plan_of(task.hidden["plan"])
    if task.public["profile"] == "graph":
        yield _known("gold, with other names and in another order", _written(_renamed(gold)), 1.0)
    for agents in CONSTANT:
        plan = chain(agents)
        name, text = f"always {' -> '.join(agents)}", _in_profile(plan, task)
        if likeness(plan, gold).score == 1.0:
            yield _known(f"{name}, where that is right", text, 1.0)
        else:
            yield _KNOWN.wrong(name, ALMOST, plan=text)
    empty = [
        dataclasses.replace(step, args={TOOLS[step.agent][step.tool]["required"][0]: "0"})
        for step in gold.steps
    ]
    text = _in_profile(_plan(empty, gold.final_step), task)
    yield _KNOWN.wrong("gold, with the same argument everywhere", FORM_SHARE, plan=text)
    if len(gold.steps) <= MAX_STEPS - 3:
        padded = _padded(gold)
        yield _KNOWN.wrong("gold, behind all other agents", ALMOST, plan=_in_profile(padded, task))


def chain(agents: tuple[str, ...]) -> Plan:
    steps: list[Step] = []
    for number, agent in enumerate(agents):
        steps.append(first_tool_step(f"s{number}", agent, "What is asked", steps[-1:]))
    return _plan(steps)


def _padded(gold: Plan) -> Plan:
    """Returns `gold` preceded by a chain of agents that its first steps do not need."""
    agents = tuple(a for a in ("search", "math", "code") if a != gold.in_order()[0].agent)
    before = [
        Step(f"p{s.id}", s.agent, s.tool, s.args, tuple(f"p{name}" for name in s.depends_on))
        for s in chain(agents).steps
    ]
    steps = [
        s if s.depends_on else Step(s.id, s.agent, s.tool, s.args, (before[-1].id,))
        for s in gold.in_order()
    ]
    return _plan([*before, *steps], gold.final_step)


def _renamed(gold: Plan) -> Plan:
    """The same plan: other ids and words, its steps listed from the last to the first."""
    names = {step.id: f"other_{number}" for number, step in enumerate(gold.steps)}
    steps = [
        Step(names[s.id], s.agent, s.tool, s.args, tuple(names[name] for name in s.depends_on))
        for s in reversed(gold.steps)
    ]
    return _plan(steps, names[gold.final_step])


def _plan(steps: list[Step], final_step: str | None = None) -> Plan:
    payloads = {(name, step.id): "the result" for step in steps for name in step.depends_on}
    return Plan(tuple(steps), payloads, final_step or steps[-1].id, "It is needed.")


def _in_profile(plan: Plan, task: Task) -> str:
    if task.public["profile"] == "graph":
        return _written(plan)
    return json.dumps(course_of(plan, task.public["query"]), ensure_ascii=False)


def _written(plan: Plan) -> str:
    return json.dumps(as_json(plan), ensure_ascii=False)


def _changed(gold: str, change: Callable[[Json], Any]) -> Json:
    plan: Json = copy.deepcopy(json.loads(gold))
    change(plan)
    return plan


def _right_output(task: Task) -> Json:
    answer = task.hidden["answer"]
    if answer["kind"] == "function":
        return {"executed": True, "answer": "", "program": answer["code"]}
    return {"executed": True, "answer": answer["answers"][0]}


def _known(name: str, text: str, reward: float, **output: Any) -> KnownResult:
    result = _KNOWN.result(plan=text, **output)
    return KnownResult(name, result, least=reward, most=reward)
