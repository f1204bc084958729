"""JSON schemas (draft 2020-12) of a plan: the graph, and each tool's arguments."""

from __future__ import annotations

from typing import Any

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
