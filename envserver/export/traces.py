"""One run as a trace: the steps thought, tool_call, tool_result, final and error, in order.

In: a delivered rollout (`trace_of`), or any JSON (`problems_of_trace`). Out: a trace, the problems
of one, or a trace as a unified trajectory (`unified_of_trace`). What holds for a valid one: the
schema; steps are numbered from 0; only tool calls have `tool` and `args`; the outcome agrees with
the steps.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .stored import StoredRollout
from .unified import FINALIZE, SCHEMA_VERSION, unified_of

Json = dict[str, Any]

SOLVED = 0.999
"""Rewards from here on count as full (floats)."""

SCHEMA_FILE = Path(__file__).with_name("trace.schema.json")
"""The JSON schema of a trace."""


def trace_of(rollout: StoredRollout, *, label: str = "auto", number: int = 1) -> Json:
    """Returns `rollout` as a trace: the one its agent wrote (`output["trace"]`), else from its
    actions.

    Args:
        label: "auto": `solved`, `partial` or `failed`, by its reward.
        number: number of the run for its model and label.
    """
    label = label_of(rollout) if label == "auto" else label
    output = rollout.output
    if isinstance(output, dict) and not problems_of_trace(output.get("trace")):
        return {**output["trace"], "label": label}
    document = unified_of(rollout)
    facts = document["metadata"]
    begin = datetime.fromtimestamp(facts["start_ts"], UTC)
    steps = _numbered(_steps(document["actions"], rollout.limit))
    model = rollout.model or "model"
    name = f"{rollout.task_id}_{model}_{label}_{number:03d}_{begin:%Y%m%d_%H%M%S}"
    return {
        "run_id": file_name(name),
        "scenario": rollout.task_id,
        "model": {"name": model, "hf_id": "", "backend": "envserver"},
        "label": label,
        "timestamp": begin.isoformat(),
        "prompt": document["question"] or "",
        "seed": rollout.seed,
        "steps": steps,
        "outcome": _outcome(steps, facts["end_ts"] - facts["start_ts"]),
        "metadata": {
            "env": rollout.env,
            "reward": rollout.reward,
            "rollout_id": rollout.rollout_id,
            "group_id": rollout.group_id,
        },
    }


def label_of(rollout: StoredRollout) -> str:
    """Returns `solved`, `partial` or `failed`; `unscored` without a reward."""
    if rollout.reward is None:
        return "unscored"
    bounds = rollout.reward_range
    if bounds.is_solved(rollout.reward) or bounds.share(rollout.reward) >= SOLVED:
        return "solved"
    return "partial" if bounds.share(rollout.reward) > 0 else "failed"


def file_name(text: str) -> str:
    """Returns `text` as a file name: a model may be called "maker/model"."""
    return re.sub(r"[^\w.-]|^\.+", "_", text)


def problems_of_trace(document: Any) -> list[str]:
    """Returns the problems of `document`, one line each; empty for a valid trace."""
    problems = [
        f"{error.json_path}: {error.message[:200]}" for error in _validator().iter_errors(document)
    ]
    return problems or [*_about_steps(document["steps"]), *_about_outcome(document)]


def unified_of_trace(trace: Json, *, domain: str = "swe") -> Json:
    """Returns a valid trace as a unified trajectory: thoughts are `reason`, a call and its result
    one action, the final text `finalize`, an error an action of that name.

    Args:
        domain: its domain; the task's id begins with it.
    """
    outcome, model = trace["outcome"], trace["model"]
    finals = [step["text"] for step in trace["steps"] if step["type"] == "final"]
    start = _seconds(trace["timestamp"])
    rest = {key: trace[key] for key in ("scenario", "label", "checks") if key in trace}
    return {
        "schema_version": SCHEMA_VERSION,
        "task_id": f"{domain}-{trace['run_id']}",
        "domain": domain,
        "question": trace["prompt"],
        "actions": [
            {"step": number, **action} for number, action in enumerate(_actions(trace["steps"]), 1)
        ],
        "final_answer": finals[-1] if finals else "",
        "metadata": {
            "start_ts": start,
            "end_ts": start + outcome["elapsed_seconds"],
            "model": model["hf_id"] or model["name"],
            "seed": trace["seed"],
            "reward": (trace.get("metadata") or {}).get("reward"),
            "components": {},
            "source": "trace",
            "run_id": trace["run_id"],
            "completed": outcome["completed"],
            "error": outcome["error"],
            **rest,
        },
    }


def _steps(actions: list[Json], limit: str | None) -> Iterator[Json]:
    """Inverts `_actions`; a run that a limit stopped has no answer."""
    for action in actions:
        tool, input, output = action["tool"], action["input"], action["output"]
        if tool == "reason":
            yield {"type": "thought", "text": _text(output)}
        elif tool == FINALIZE:
            if not limit:
                yield {"type": "final", "text": _text(output)}
        else:
            args = input if isinstance(input, dict) else {"input": input}
            source = json.dumps({"tool": tool, "args": args}, ensure_ascii=False)
            yield {"type": "tool_call", "text": source, "tool": tool, "args": args}
            failed = {"error": action["error"]} if action.get("error") else {}
            said = failed["error"] if failed and output is None else output
            yield {"type": "tool_result", "text": _text(said), **failed}
    if limit:
        yield {"type": "error", "text": f"limit: {limit}"}


def _actions(steps: list[Json]) -> Iterator[Json]:
    waiting: Json | None = None
    for step in steps:
        kind, text = step["type"], step["text"]
        if waiting is not None:
            is_result = kind == "tool_result"
            failed = {"error": step["error"]} if is_result and step.get("error") else {}
            yield {**waiting, "output": text if is_result else "", **failed}
            waiting = None
            if is_result:
                continue
        if kind == "tool_call":
            waiting = {"tool": step["tool"], "input": step["args"]}
        else:
            tool = {"thought": "reason", "final": FINALIZE}.get(kind, kind)
            yield {"tool": tool, "input": {}, "output": text}
    if waiting is not None:
        yield {**waiting, "output": ""}


def _numbered(steps: Iterator[Json]) -> list[Json]:
    return [{"i": number, **step} for number, step in enumerate(steps)]


def _outcome(steps: list[Json], seconds: float) -> Json:
    types = [step["type"] for step in steps]
    return {
        "num_steps": len(types),
        "elapsed_seconds": round(max(0.0, seconds), 3),
        "completed": types[-1:] == ["final"],
        "error": "error" in types,
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _seconds(timestamp: str) -> float:
    moment = datetime.fromisoformat(timestamp)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


@functools.cache
def _validator() -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(json.loads(SCHEMA_FILE.read_bytes()))


def _about_steps(steps: list[Json]) -> Iterator[str]:
    for number, step in enumerate(steps):
        place = f"$.steps[{number}]"
        if step["i"] != number:
            yield f"{place}.i: {step['i']} where {number} is due"
        is_call = step["type"] == "tool_call"
        for key in ("tool", "args"):
            if is_call and key not in step:
                yield f"{place}: a tool_call without {key}"
            if not is_call and key in step:
                yield f"{place}.{key}: on a {step['type']}"
        if is_call and not _is_json(step["text"]):
            yield f"{place}.text: it is not the JSON of the call"


def _about_outcome(trace: Json) -> Iterator[str]:
    outcome = trace["outcome"]
    due = _outcome(trace["steps"], outcome["elapsed_seconds"])
    for key in ("num_steps", "completed", "error"):
        if outcome[key] != due[key]:
            said = json.dumps(outcome[key])
            yield f"$.outcome.{key}: {said}, but its steps say {json.dumps(due[key])}"
    try:
        _seconds(trace["timestamp"])
    except ValueError:
        yield f"$.timestamp: {trace['timestamp'][:60]!r} is not a time"


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
