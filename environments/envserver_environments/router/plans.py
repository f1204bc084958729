"""Parses a model's answer as a plan: strict JSON, the schema, the tools' arguments, the graph.

In: the whole text of an answer. Out: a Plan, or PlanError that names the first fault. A parsed plan
is valid: its ids differ, every dependency is a step, there is no cycle, every step leads to the
final one, which is the last, and the handoffs are the dependencies, each once. Pure.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal

from envserver_tools.calling import StrictDecoder, check_characters
from envserver_tools.visible import visible_text
from jsonschema import Draft202012Validator

MAX_STEPS = 8

_STEP: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["id", "agent", "tool", "args", "depends_on"],
    "properties": {
        "id": {"type": "string", "pattern": "^[a-z][a-z0-9_]{0,15}$"},
        "agent": {"enum": ["math", "code", "search"]},
        "tool": {"type": "string"},
        "args": {"type": "object"},
        "depends_on": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    },
}

_HANDOFF: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["from", "to", "payload"],
    "properties": {
        "from": {"type": "string"},
        "to": {"type": "string"},
        "payload": {"type": "string", "minLength": 1},
    },
}

GRAPH: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "additionalProperties": False,
    "required": ["rationale", "steps", "handoffs", "final_step"],
    "properties": {
        "rationale": {"type": "string", "minLength": 1, "maxLength": 2000},
        "steps": {"type": "array", "minItems": 1, "maxItems": MAX_STEPS, "items": _STEP},
        "handoffs": {"type": "array", "items": _HANDOFF},
        "final_step": {"type": "string"},
    },
}
"""A plan of the profile `graph`."""

_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}


def _arguments(required: str, properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [required],
        "additionalProperties": False,
    }


TOOLS: dict[str, dict[str, dict[str, Any]]] = {
    "math": {
        "solve": _arguments("problem", {"problem": _TEXT}),
        "calculate": _arguments("expression", {"expression": _TEXT}),
    },
    "code": {
        "write": _arguments("task", {"task": _TEXT, "language": {"enum": ["python"]}}),
        "run_tests": _arguments("target", {"target": {"type": "string"}}),
    },
    "search": {
        "query": _arguments(
            "q", {"q": _TEXT, "top_k": {"type": "integer", "minimum": 1, "maximum": 20}}
        ),
    },
}
"""The tools of each agent, with the schema of each tool's arguments."""

_TEXTS: dict[str, Any] = {"type": "array", "items": _TEXT, "minItems": 1}

COURSE: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "additionalProperties": False,
    "required": [
        "route_plan", "route_rationale", "expected_artifacts", "thinking_outline", "handoff_plan",
        "todo_list", "difficulty", "tags", "acceptance_criteria", "metrics",
    ],
    "properties": {
        "route_plan": {**_TEXTS, "maxItems": MAX_STEPS},
        "route_rationale": _TEXT,
        "expected_artifacts": _TEXTS,
        "thinking_outline": _TEXTS,
        "handoff_plan": _TEXT,
        "todo_list": _TEXTS,
        "difficulty": {"enum": ["introductory", "intermediate", "advanced"]},
        "tags": _TEXTS,
        "acceptance_criteria": _TEXTS,
        "metrics": {"type": "object", "minProperties": 1},
    },
}  # fmt: skip
"""A plan of the profile `coursegpt`."""

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
    """One task of a sub-agent.

    Args:
        agent: "math", "code" or "search".
        tool: one of the agent's tools (see `TOOLS`), which `args` fit.
        depends_on: ids of the steps whose results it gets.
    """

    id: str
    agent: str
    tool: str
    args: Mapping[str, Any]
    depends_on: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Steps in the order of their dependencies.

    Args:
        payloads: the text of each handoff, by (from, to): one for each dependency.
        final_step: id of the step whose result is the answer.
    """

    steps: tuple[Step, ...]
    payloads: Mapping[tuple[str, str], str]
    final_step: str
    rationale: str

    def in_order(self) -> list[Step]:
        """Returns the steps, each after those that it depends on."""
        by_id = {step.id: step for step in self.steps}
        order = TopologicalSorter({step.id: step.depends_on for step in self.steps})
        return [by_id[name] for name in order.static_order()]


def read_plan(text: str) -> Plan:
    """Parses the plan in an answer of the profile `graph`."""
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
    """The plan that a JSON value is. Raises like `read_plan`."""
    check_schema(value, _GRAPH)
    steps = tuple(
        Step(step["id"], step["agent"], step["tool"], step["args"], tuple(step["depends_on"]))
        for step in value["steps"]
    )
    for step in steps:
        check_tool(step)
    _check_graph(steps, value["final_step"])
    _check_handoffs(steps, value["handoffs"])
    payloads = {
        (handoff["from"], handoff["to"]): handoff["payload"] for handoff in value["handoffs"]
    }
    return Plan(steps, payloads, value["final_step"], value["rationale"])


def as_json(plan: Plan) -> dict[str, Any]:
    """`plan` as a model writes it: the inverse of `plan_of`."""
    return {
        "rationale": plan.rationale,
        "steps": [
            {
                "id": step.id,
                "agent": step.agent,
                "tool": step.tool,
                "args": dict(step.args),
                "depends_on": list(step.depends_on),
            }
            for step in plan.steps
        ],
        "handoffs": [
            {"from": before, "to": after, "payload": payload}
            for (before, after), payload in plan.payloads.items()
        ],
        "final_step": plan.final_step,
    }


def check_schema(value: Any, validator: Draft202012Validator) -> None:
    """Raises PlanError: `value` is not as the schema has it."""
    broken = _first_error(value, validator)
    if broken is not None:
        raise PlanError("schema", broken)


def check_tool(step: Step) -> None:
    """Raises PlanError: the agent has no such tool, or the arguments are not the tool's."""
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
    """`last`, and all steps that it depends on, however indirectly."""
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
