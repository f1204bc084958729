"""Plans: the profile `graph`, steps and handoffs, and `coursegpt`, ten keys with a route of
commands: `/math(...)`, `/code(...)` or `/general-search(query="...", mode=web)`, each of which
depends on the one before it. Pure."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Literal

from envserver_records.tasks import Json
from envserver_tools.calling import StrictDecoder, check_characters, visible_text
from jsonschema import Draft202012Validator

MAX_STEPS = 8
"""As in the schemas."""

_SCHEMAS: Json = json.loads(Path(__file__).with_name("schemas.json").read_text(encoding="utf-8"))
GRAPH: Json = _SCHEMAS["graph"]
TOOLS: dict[str, dict[str, Json]] = _SCHEMAS["tools"]
COURSE: Json = _SCHEMAS["coursegpt"]
COURSE_KEYS: tuple[str, ...] = tuple(COURSE["required"])


MAX_CHARACTERS = 100_000
"""A longer answer is not a plan."""

ErrorKind = Literal[
    "unclosed_think", "json", "schema", "unknown_tool", "tool_args", "duplicate_id",
    "unknown_dependency", "final_step", "cycle", "final_step_not_last", "orphan_step",
    "handoffs_mismatch",
]  # fmt: skip


class PlanError(Exception):
    """The answer is not a valid plan. `kind` is the error's kind, the message is for the model."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Step:
    """One task of a sub-agent; `args` fit the tool (see `TOOLS`)."""

    id: str
    agent: str
    tool: str
    args: Json
    depends_on: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Steps, each after those that it depends on; `payloads` has the text of each handoff, by
    (from, to), one for each dependency."""

    steps: tuple[Step, ...]
    payloads: Mapping[tuple[str, str], str]
    final_step: str
    rationale: str

    def in_order(self) -> list[Step]:
        by_id = {step.id: step for step in self.steps}
        order = TopologicalSorter({step.id: step.depends_on for step in self.steps})
        return [by_id[name] for name in order.static_order()]


def read_plan(text: str) -> Plan:
    return plan_of(read_json(text))


def read_json(text: str) -> Any:
    """The one JSON value that the visible part of an answer is."""
    seen = visible_text(text)
    if seen is None:
        raise PlanError("unclosed_think", "<think> was never closed.")
    source = seen.strip()
    if len(source) > MAX_CHARACTERS:
        raise PlanError("schema", f"The answer is longer than {MAX_CHARACTERS} characters.")
    try:
        value = json.loads(source, cls=StrictDecoder)
        check_characters(source, value)
    except (ValueError, RecursionError) as error:
        raise PlanError("json", f"The answer is not one strict JSON value: {error}.") from error
    return value


def plan_of(value: Any) -> Plan:
    check_schema(value, _GRAPH)
    steps = tuple(
        Step(**{**step, "depends_on": tuple(step["depends_on"])}) for step in value["steps"]
    )
    for step in steps:
        check_tool(step)
    _check_graph(steps, value["final_step"])
    _check_handoffs(steps, value["handoffs"])
    payloads = {
        (handoff["from"], handoff["to"]): handoff["payload"] for handoff in value["handoffs"]
    }
    return Plan(steps, payloads, value["final_step"], value["rationale"])


def as_json(plan: Plan) -> Json:
    """`plan` as a model writes it: the inverse of `plan_of`."""
    return {
        "rationale": plan.rationale,
        "steps": [{**asdict(step), "depends_on": list(step.depends_on)} for step in plan.steps],
        "handoffs": [
            {"from": before, "to": after, "payload": payload}
            for (before, after), payload in plan.payloads.items()
        ],
        "final_step": plan.final_step,
    }


def check_schema(value: Any, validator: Draft202012Validator) -> None:
    broken = _first_error(value, validator)
    if broken is not None:
        raise PlanError("schema", broken)


def check_tool(step: Step) -> None:
    validator = _ARGUMENTS.get((step.agent, step.tool))
    if validator is None:
        tools = ", ".join(TOOLS[step.agent])
        raise PlanError(
            "unknown_tool",
            f"Step {step.id}: {step.agent} has no tool {step.tool[:50]!r}, only: {tools}.",
        )
    broken = _first_error(step.args, validator)
    if broken is not None:
        raise PlanError("tool_args", f"Step {step.id}, args of {step.tool}: {broken}")


def _check_graph(steps: tuple[Step, ...], final_step: str) -> None:
    before = {step.id: step.depends_on for step in steps}
    if len(before) != len(steps):
        raise PlanError("duplicate_id", "Two steps have the same id.")
    for step in steps:
        for name in step.depends_on:
            if name not in before:
                raise PlanError(
                    "unknown_dependency", f"Step {step.id} depends on {name[:50]!r}, which is none."
                )
    if final_step not in before:
        raise PlanError("final_step", f"final_step {final_step[:50]!r} is not a step.")
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        raise PlanError("cycle", f"Steps wait for each other: {error.args[1]}.") from error
    if any(final_step in step.depends_on for step in steps):
        raise PlanError("final_step_not_last", f"Other steps depend on final_step {final_step}.")
    unused = before.keys() - _leading_to(final_step, before)
    if unused:
        raise PlanError("orphan_step", f"Nothing uses the result of: {', '.join(sorted(unused))}.")


def _leading_to(last: str, before: Mapping[str, tuple[str, ...]]) -> set[str]:
    found: set[str] = set()
    waiting = [last]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += before[name]
    return found


def _check_handoffs(steps: tuple[Step, ...], handoffs: list[dict[str, str]]) -> None:
    wanted = Counter((name, step.id) for step in steps for name in step.depends_on)
    given = Counter((handoff["from"], handoff["to"]) for handoff in handoffs)
    if wanted != given:
        raise PlanError(
            "handoffs_mismatch",
            "There must be one handoff for each entry of depends_on, and no other; "
            f"missing: {_pairs(wanted - given)}; too many: {_pairs(given - wanted)}.",
        )


def _pairs(pairs: Counter[tuple[str, str]]) -> str:
    shown = [f"{before[:20]}->{after[:20]}" for before, after in list(pairs.elements())[:8]]
    return ", ".join(shown) or "none"


def _first_error(value: Any, validator: Draft202012Validator) -> str | None:
    try:
        broken = next(iter(validator.iter_errors(value)), None)
    except RecursionError:
        return "It is nested too deeply."
    if broken is None:
        return None
    message = broken.message
    short = message if len(message) <= 300 else f"{message[:200]} ... {message[-90:]}"
    return f"{broken.json_path}: {short}"


_GRAPH = Draft202012Validator(GRAPH)
_ARGUMENTS = {
    (agent, tool): Draft202012Validator(arguments)
    for agent, tools in TOOLS.items()
    for tool, arguments in tools.items()
}


COMMANDS = {"math": "/math", "code": "/code", "search": "/general-search"}

_IN_PYTHON = ", using Python"
_COMMAND = re.compile(r"(/[a-z-]+)\((.*)\)", re.DOTALL)
_QUERY = re.compile(r'query\s*=\s*"((?:[^"\\]|\\.)*)"', re.DOTALL)
_MODE = re.compile(r"\bmode\s*=\s*[\"']?(?:web|rag|both)\b")


def read_course(text: str) -> Plan:
    return plan_of_course(read_json(text))


def plan_of_course(value: Any) -> Plan:
    check_schema(value, _COURSE)
    steps: list[Step] = []
    for number, command in enumerate(value["route_plan"]):
        step = _step(f"s{number + 1}", command, steps[-1:])
        if steps and steps[-1].agent == step.agent:
            raise PlanError("schema", f"route_plan calls {COMMANDS[step.agent]} twice in a row.")
        steps.append(step)
    payloads = {(name, s.id): value["handoff_plan"] for s in steps for name in s.depends_on}
    return Plan(tuple(steps), payloads, steps[-1].id, value["route_rationale"])


def course_of(plan: Plan, query: str) -> Json:
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
    """The steps one after the other; those of one agent in a row are one, with the id of the
    last."""
    merged: list[Step] = []
    for step in plan.in_order():
        if merged and merged[-1].agent == step.agent:
            both = f"{_brief(merged[-1])}; then {_brief(step)}"
            merged[-1] = first_tool_step(step.id, step.agent, both)
        else:
            merged.append(step)
    return merged


def first_tool_step(name: str, agent: str, request: str, before: Sequence[Step] = ()) -> Step:
    """A step with the agent's first tool, after the steps `before`."""
    tool = next(iter(TOOLS[agent]))
    argument = TOOLS[agent][tool]["required"][0]
    return Step(name, agent, tool, {argument: request}, tuple(step.id for step in before))


def _step(name: str, command: str, before: list[Step]) -> Step:
    found = _COMMAND.fullmatch(command.strip())
    agents = {written: agent for agent, written in COMMANDS.items()}
    if found is None or found[1] not in agents:
        known = ", ".join(f"{written}(...)" for written in agents)
        raise PlanError("unknown_tool", f"{command[:80]!r} is none of: {known}.")
    agent, inside = agents[found[1]], found[2].strip()
    if agent == "search" and not _MODE.search(inside):
        raise PlanError("tool_args", f"{command[:80]!r} has no mode=web, mode=rag or mode=both.")
    step = first_tool_step(name, agent, _said(agent, inside), before)
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


def course_metrics(text: str, gold: Json) -> dict[str, float]:
    """The metrics of an answer, beside the ten keys of the right one; truths are 0 and 1. Only
    `json_valid` where the visible text is not a JSON object, or longer than any plan."""
    valid = {"json_valid": float(_object(text) is not None)}
    answer = _object(visible_text(text) or "")
    if answer is None:
        return valid
    try:
        found = _measured(answer, gold)
    except RecursionError:  # nested too deeply to be anything
        return valid
    return valid | {name: float(value) for name, value in found.items()}


def _object(text: str) -> Json | None:
    if len(text) > MAX_CHARACTERS:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _measured(answer: Json, gold: Json) -> dict[str, float | bool]:
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
