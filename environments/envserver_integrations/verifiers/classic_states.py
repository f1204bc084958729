"""States of classic rollouts as JSON, so that a scorer process can have them, and back.

A state holds the conversation twice: whole, and by turn with the engine's answers. What is sent has
it once; turns refer to it by the number of their messages. What the environment itself added stays
if it is JSON-like.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import to_jsonable_python
from verifiers.legacy.types import RolloutTiming, State, flatten_task_input
from verifiers.legacy.utils.message_utils import normalize_messages

_LEFT_OUT = frozenset(
    {"input", "task", "client", "prompt", "completion", "trajectory", "timing", "error"}
    | {"tool_defs", "usage", "usage_tracker", "reward", "metrics", "advantage"}
)


def as_json(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state after a rollout, JSON-like."""
    turns = [
        {
            "messages": len(step["prompt"]),
            "completion": _messages(step["completion"]),
            "is_truncated": bool(step.get("is_truncated")),
            "reward": step.get("reward"),
            "extras": _json_like(step.get("extras") or {}),
        }
        for step in state.get("trajectory") or []
    ]
    others = {
        name: value
        for name, value in ((key, _json_like(state[key])) for key in state if key not in _LEFT_OUT)
        if value is not None
    }
    return {
        "completion": _messages(state.get("completion") or []),
        "trajectory": turns,
        "timing": to_jsonable_python(state["timing"], fallback=str),
        "others": others,
    }


def from_json(row: Mapping[str, Any], kept: Mapping[str, Any]) -> State:
    """Returns a state for the rubric.

    Args:
        row: of the data set, with its answer.
        kept: what `as_json` returned.
    """
    state = new_state(row)
    conversation = [*state["prompt"], *normalize_messages(kept["completion"])]
    state["completion"] = conversation[len(state["prompt"]) :]
    state["trajectory"] = [
        {
            "prompt": conversation[: turn["messages"]],
            "completion": normalize_messages(turn["completion"]),
            "response": None,
            "tokens": None,
            "reward": turn["reward"],
            "advantage": None,
            "is_truncated": turn["is_truncated"],
            "trajectory_id": kept["others"].get("trajectory_id", ""),
            "extras": turn["extras"],
        }
        for turn in kept["trajectory"]
    ]
    state["timing"] = RolloutTiming.model_validate(kept["timing"])
    for name, value in kept["others"].items():
        state[name] = value
    return state


def from_messages(row: Mapping[str, Any], messages: list[dict[str, Any]]) -> State:
    """Returns a state of a conversation that was cut off, or of a bare response."""
    state = new_state(row)
    completion = messages[len(state["prompt"]) :]
    if not completion and messages and messages[-1].get("role") == "assistant":
        completion = messages[-1:]
    state["completion"] = normalize_messages(completion)
    state["is_truncated"] = True
    turns = [each for each in state["completion"] if each.role == "assistant"]
    state["trajectory"] = [
        {"prompt": [], "completion": [turn], "response": None, "tokens": None, "reward": None}
        | {"advantage": None, "is_truncated": False, "trajectory_id": "", "extras": {}}
        for turn in turns
    ]
    return state


def new_state(row: Mapping[str, Any]) -> State:
    """Returns the state before a rollout, as `Environment.init_state` makes it, without a model."""
    given = dict(row)
    if isinstance(given.get("info"), str):
        given["info"] = json.loads(given["info"])
    task = flatten_task_input(given)
    state = State(input=task)
    state["task"] = task
    state["prompt"] = normalize_messages(task.get("prompt") or [])
    state["completion"] = []
    state["trajectory"] = []
    state["timing"] = RolloutTiming()
    for name in ("reward", "metrics", "error", "final_env_response", "stop_condition"):
        state[name] = None
    state["is_completed"], state["is_truncated"] = True, False
    return state


def _messages(messages: Any) -> Any:
    plain = to_jsonable_python(list(messages), fallback=str)
    return [
        {key: value for key, value in each.items() if value is not None}
        if isinstance(each, dict)
        else each
        for each in plain
    ]


def _json_like(value: Any) -> Any:
    """Returns the value if JSON can hold it, else None."""
    try:
        return json.loads(json.dumps(to_jsonable_python(value), allow_nan=False))
    except (TypeError, ValueError):
        return None
