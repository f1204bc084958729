"""The profile `coursegpt`: a plan of ten keys with a route of commands, and how it is a graph.

A command is `/math(...)`, `/code(...)` or `/general-search(query="...", mode=web)`. A route is a
chain: each command depends on the one before it. Pure.
"""

from __future__ import annotations

import json
import re
from typing import Any

from jsonschema import Draft202012Validator

from .plans import Plan, PlanError, Step, check_schema, check_tool, read_json
from .schemas import COURSE, TOOLS

COMMANDS = {"math": "/math", "code": "/code", "search": "/general-search"}
"""The command of each agent."""

_IN_PYTHON = ", using Python"
_COMMAND = re.compile(r"(/[a-z-]+)\((.*)\)", re.DOTALL)
_QUERY = re.compile(r'query\s*=\s*"((?:[^"\\]|\\.)*)"', re.DOTALL)
_MODE = re.compile(r"\bmode\s*=\s*[\"']?(?:web|rag|both)\b")


def read_course(text: str) -> Plan:
    """Parses the plan in an answer of this profile."""
    return plan_of_course(read_json(text))


def plan_of_course(value: Any) -> Plan:
    """The plan that a JSON value of ten keys is. Raises like `read_course`."""
    check_schema(value, _COURSE)
    steps: list[Step] = []
    for number, command in enumerate(value["route_plan"]):
        step = _step(f"s{number + 1}", command, steps[-1:])
        if steps and steps[-1].agent == step.agent:
            raise PlanError("schema", f"route_plan calls {COMMANDS[step.agent]} twice in a row.")
        steps.append(step)
    payloads = {(name, s.id): value["handoff_plan"] for s in steps for name in s.depends_on}
    return Plan(tuple(steps), payloads, steps[-1].id, value["route_rationale"])


def course_of(plan: Plan, query: str) -> dict[str, Any]:
    """Converts `plan` to ten keys, as a model would write it; parallel steps become a sequence."""
    steps = chain_of(plan)
    commands = [COMMANDS[step.agent] for step in steps]
    kinds = ("introductory", "intermediate", "advanced")
    words = re.findall(r"[a-z]{5,}", query.lower())[:3]
    return {
        "route_plan": [_command(step) for step in steps],
        "route_rationale": plan.rationale,
        "expected_artifacts": [f"- what {command} found" for command in commands],
        "thinking_outline": [
            *(f"{number}. {_brief(step)}" for number, step in enumerate(steps, 1)),
            f"{len(steps) + 1}. Check the answer against the query",
        ],
        "handoff_plan": f"{' -> '.join(commands)} -> router QA "
        f"(verify: the answer fits the query; fallback: back to {commands[0]})",
        "todo_list": [
            *(f"- [ ] {COMMANDS[step.agent]}: {_brief(step)}" for step in steps),
            "- [ ] router QA: check the answer",
        ],
        "difficulty": kinds[min(len(steps), 3) - 1],
        "tags": words or ["query"],
        "acceptance_criteria": ["- the answer is what the query asks for"],
        "metrics": {"primary": ["the answer is right"], "secondary": ["number of steps"]},
    }


def chain_of(plan: Plan) -> list[Step]:
    """The steps of `plan` one after the other; those of one agent in a row are one, with the id of
    the last."""
    merged: list[Step] = []
    for step in plan.in_order():
        if merged and merged[-1].agent == step.agent:
            both = f"{_brief(merged[-1])}; then {_brief(step)}"
            tool = next(iter(TOOLS[step.agent]))
            argument = TOOLS[step.agent][tool]["required"][0]
            merged[-1] = Step(step.id, step.agent, tool, {argument: both})
        else:
            merged.append(step)
    return merged


def _step(name: str, command: str, before: list[Step]) -> Step:
    found = _COMMAND.fullmatch(command.strip())
    agents = {written: agent for agent, written in COMMANDS.items()}
    if found is None or found[1] not in agents:
        known = ", ".join(f"{written}(...)" for written in agents)
        raise PlanError("unknown_tool", f"{command[:80]!r} is none of: {known}.")
    agent, inside = agents[found[1]], found[2].strip()
    if agent == "search" and not _MODE.search(inside):
        raise PlanError("tool_args", f"{command[:80]!r} has no mode=web, mode=rag or mode=both.")
    tool = next(iter(TOOLS[agent]))
    argument = TOOLS[agent][tool]["required"][0]
    step = Step(name, agent, tool, {argument: _said(agent, inside)}, tuple(s.id for s in before))
    check_tool(step)
    return step


def _said(agent: str, inside: str) -> str:
    """Returns the request in a command: all its text but for the language, or a search's query."""
    query = _QUERY.search(inside) if agent == "search" else None
    if query is None:
        return inside.removesuffix(_IN_PYTHON)
    return query[1].replace('\\"', '"').replace("\\\\", "\\")


def _command(step: Step) -> str:
    match step.agent:
        case "search":
            return (
                f"/general-search(query={json.dumps(_brief(step), ensure_ascii=False)}, mode=rag)"
            )
        case "code":
            return f"/code({_brief(step)}{_IN_PYTHON})"
    return f"{COMMANDS[step.agent]}({_brief(step)})"


def _brief(step: Step) -> str:
    return next(str(value) for value in step.args.values())


_COURSE = Draft202012Validator(COURSE)
