"""Metrics of the authors of the profile `coursegpt`; never part of a reward.

Their definitions are kept exactly, for comparison: sets of tools ignore order and repeats, an empty
route has a precision of 1, and `json_valid` reads the whole text, thoughts included, with Python's
own decoder. All other metrics use the visible text. Pure.
"""

from __future__ import annotations

import json
import re
from typing import Any

from envserver_tools.visible import visible_text

from .plans import MAX_CHARACTERS

_COMMAND = re.compile(r"/[a-zA-Z0-9_-]+")
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
    command = _COMMAND.search(item)
    if command:
        return command.group()
    return "router QA" if _QA in item.lower() else None


def _tools(route: Any) -> list[str]:
    """The commands of a route; a text is a route of characters, as theirs has it."""
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
