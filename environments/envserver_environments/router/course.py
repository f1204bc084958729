"""The profile `coursegpt`: a plan of ten keys with a route of commands, and how it is a graph.

A command is `/math(...)`, `/code(...)` or `/general-search(query="...", mode=web)`. A route is a
chain: each command depends on the one before it. Pure.
"""

from __future__ import annotations

import json
import re
from typing import Any

from envserver_tools.visible import visible_text
from jsonschema import Draft202012Validator

from .plans import (
    COURSE,
    MAX_CHARACTERS,
    TOOLS,
    Plan,
    PlanError,
    Step,
    check_schema,
    check_tool,
    read_json,
)

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


# Metrics of the authors of the profile; never part of a reward. Their definitions are kept exactly,
# for comparison: sets of tools ignore order and repeats, an empty route has a precision of 1, and
# `json_valid` reads the whole text, thoughts included, with Python's own decoder. All other metrics
# use the visible text.

_COMMAND_NAME = re.compile(r"/[a-zA-Z0-9_-]+")
_QA = "router qa"
_KEPT = ("primary_guidance", "secondary_guidance", "primary_computation", "secondary_computation")


def course_metrics(text: str, gold: dict[str, Any]) -> dict[str, float]:
    """The metrics of an answer, beside the ten keys of the right one; truths are 0 and 1.

    Returns:
        Only `json_valid` where the visible text is not a JSON object, or longer than any plan.
    """
    valid = {"json_valid": float(_object(text) is not None)}
    answer = _object(visible_text(text) or "")
    if answer is None:
        return valid
    try:
        found = _measured(answer, gold)
    except RecursionError:  # nested too deeply to be anything
        return valid
    return valid | {name: float(value) for name, value in found.items()}


def _object(text: str) -> dict[str, Any] | None:
    if len(text) > MAX_CHARACTERS:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _measured(answer: dict[str, Any], gold: dict[str, Any]) -> dict[str, float | bool]:
    wanted = _tools(gold.get("route_plan"))
    handoff = _lower(answer.get("handoff_plan"))
    ratio = len(json.dumps(answer, sort_keys=True)) / len(json.dumps(gold, sort_keys=True))
    return {
        **_route(answer.get("route_plan", []), gold.get("route_plan", []), wanted),
        **_blocks(answer.get("metrics"), gold.get("metrics")),
        **_todo(answer.get("todo_list"), wanted),
        "expected_artifacts_nonempty": _is_filled(answer.get("expected_artifacts")),
        "acceptance_criteria_nonempty": _is_filled(answer.get("acceptance_criteria")),
        "handoff_tools_covered": (
            all(tool.lower() in handoff for tool in wanted) if wanted else bool(handoff)
        ),
        "handoff_router_qa": _QA in handoff,
        "total_token_count": _words(answer),
        "length_ratio": ratio,
        "length_ratio_gt_1.1": ratio > 1.1,
        "length_ratio_gt_1.25": ratio > 1.25,
        "length_ratio_lt_0.9": ratio < 0.9,
    }


def _route(given: Any, gold: Any, wanted: list[str]) -> dict[str, float | bool]:
    tools = _tools(given)
    both = len(set(tools) & set(wanted))
    return {
        "route_plan_exact": given == gold,
        "route_length_match": len(tools) == len(wanted),
        "route_first_tool_match": tools[:1] == wanted[:1],
        "route_last_tool_match": tools[-1:] == wanted[-1:],
        "route_tool_precision": both / len(set(tools)) if tools else 1.0,
        "route_tool_recall": both / len(set(wanted)) if wanted else 1.0,
    }


def _blocks(given: Any, gold: Any) -> dict[str, float | bool]:
    mine, theirs = (block if isinstance(block, dict) else {} for block in (given, gold))
    found: dict[str, float | bool] = {"metrics_keys_match": mine.keys() == theirs.keys()}
    for key in ("primary", "secondary"):
        found[f"metrics_{key}_list"] = isinstance(mine.get(key), list)
        found[f"metrics_{key}_nonempty"] = _is_filled(mine.get(key))
    for key in _KEPT:
        if theirs.get(key) is not None:
            found[f"{key}_retained"] = type(mine.get(key)) is type(theirs[key])
    return found


def _todo(items: Any, wanted: list[str]) -> dict[str, float | bool]:
    items = items if isinstance(items, list) else []
    named = [_named(item) for item in items]
    fitting = sum(tool in wanted or tool.lower().startswith("router") for tool in named if tool)
    return {
        "todo_tool_alignment": fitting / len(items) if items else float(not wanted),
        "todo_covers_all_tools": set(wanted) <= set(named),
    }


def _named(item: Any) -> str | None:
    """The command that an item of the list is about."""
    if not isinstance(item, str):
        return None
    command = _COMMAND_NAME.search(item)
    if command:
        return command.group()
    return "router QA" if _QA in item.lower() else None


def _tools(route: Any) -> list[str]:
    steps = route if isinstance(route, list | str | dict) else ()
    return [step.split("(", 1)[0].strip() if isinstance(step, str) else "" for step in steps]


def _is_filled(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _lower(value: Any) -> str:
    return value.lower() if isinstance(value, str) else ""


def _words(value: Any) -> int:
    match value:
        case str():
            return len(value.split())
        case list():
            return sum(map(_words, value))
        case dict():
            return sum(map(_words, value.values()))
    return 0
