"""One rollout as a readable record: the unified trajectory, version 1; and as a trace.

A valid one fits the schema, its steps are numbered 1 to n in order of time, it started before it
ended, and every number is finite.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import orjson
from envserver_records.files import replace_file, storing
from envserver_records.records import Message, Result, Trajectory, text_of
from envserver_records.timings import compact_timing

from ..environment import answer_text
from .stored import StoredRollout, trajectory_of

SCHEMA_VERSION = 1
DOMAINS = ("swe", "math", "code", "video", "mhqa", "tau", "router", "gaia")
FINALIZE = "finalize"
Json = dict[str, Any]

SCHEMA_FILE = Path(__file__).with_name("trajectory.schema.json")
"""Other programs read it, too."""


def unified(
    trajectory: Trajectory,
    *,
    ended_at: float,
    question: str | None = None,
    final_answer: str | None = None,
    model: str = "",
    seed: int | None = None,
    source: str = "envserver",
    tokens: bool = False,
) -> Json:
    """Returns `trajectory` as a unified one.

    Where its agent logged no actions, they are read from the conversation; a last action `finalize`
    gives the answer, if none does.

    Args:
        ended_at: `time.time()` at its end.
        question: unset: the user's first message.
        final_answer: unset: from the output, or else the last message.
        tokens: include the training rows, not only the conversations.
    """
    if question is None:
        question = first_question(trajectory.messages)
    if final_answer is None:
        result = Result(output=trajectory.output, messages=trajectory.messages)
        final_answer = answer_text(result)
    actions = trajectory.actions or actions_of(trajectory.messages)
    times = [action["ts"] for action in actions if "ts" in action]
    started_at = ended_at - trajectory.usage.seconds
    return {
        "schema_version": SCHEMA_VERSION,
        "task_id": (
            trajectory.task_id
            if trajectory.task_id.startswith(f"{trajectory.env}-")
            else f"{trajectory.env}-{trajectory.task_id}"
        ),
        "domain": trajectory.env,
        "question": question,
        "actions": _finalized(actions, final_answer),
        "final_answer": final_answer,
        "metadata": {
            "start_ts": min([started_at, *times]),
            "end_ts": max([ended_at, *times]),
            "model": model,
            "seed": seed,
            "reward": trajectory.score.reward,
            "components": trajectory.score.components,
            "source": source,
            "rollout_id": trajectory.rollout_id,
            "turns": trajectory.turns,
            "finish_reason": trajectory.finish_reason,
            "limit": trajectory.limit,
            "flags": trajectory.flags,
            **_present(
                hooks=trajectory.hooks,
                egress=trajectory.egress,
                cost=trajectory.usage.cost,
                timings=[compact_timing(timing) for timing in trajectory.timings],
                attempts=trajectory.attempts,
            ),
            "sequences": list(_sequences(trajectory, tokens)),
        },
    }


def unified_of(rollout: StoredRollout, *, tokens: bool = False) -> Json:
    """Returns a delivered rollout as a unified trajectory; `metadata.task_id` is its task's id."""
    document = unified(
        msgspec.structs.replace(trajectory_of(rollout), env=rollout.domain),
        ended_at=rollout.created_at,
        model=rollout.model,
        seed=rollout.seed,
        tokens=tokens,
    )
    document["metadata"] |= {
        "task_id": rollout.task_id,
        "group_id": rollout.group_id,
        "split": rollout.split,
    }
    return document


def _present(**values: Any) -> Json:
    return {name: msgspec.to_builtins(value) for name, value in values.items() if value}


def actions_of(messages: list[Message]) -> list[Json]:
    """Returns the actions in a conversation: text is `reason`, each tool call is one action."""
    results = {
        message.get("tool_call_id"): message.get("content")
        for message in messages
        if message.get("role") == "tool"
    }
    actions: list[Json] = []
    for message in messages:
        if message.get("role") != "assistant":
            continue
        if said := text_of(message):
            actions.append(_action(len(actions) + 1, "reason", {}, said))
        for call in message.get("tool_calls") or ():
            tool, arguments = called(call)
            output = results.get(call.get("id"), "")
            actions.append(_action(len(actions) + 1, tool, arguments, output))
    return actions


def called(call: Any) -> tuple[str, Any]:
    """Returns the function of a tool call and its arguments, as text if that is not JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments")
    with contextlib.suppress(ValueError, RecursionError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments or {}
    return str(function.get("name") or "unnamed"), arguments


def problems_of(document: Any, *, domains: Collection[str] = DOMAINS) -> list[str]:
    """Returns the problems of `document`, one line each; none for a unified trajectory."""
    return _against(SCHEMA_FILE, document) or [
        *_about_names(document, domains),
        *_about_actions(document["actions"], document["metadata"]),
        *_about_numbers(document, "$"),
    ]


def write_json(path: Path, document: Json) -> None:
    data = orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data)


@functools.cache
def _validator(schema: Path) -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(orjson.loads(schema.read_bytes()))


def _against(schema: Path, document: Any) -> list[str]:
    errors = _validator(schema).iter_errors(document)
    return [f"{error.json_path}: {error.message[:200]}" for error in errors]


def _about_names(document: Json, domains: Collection[str]) -> Iterator[str]:
    domain, task_id = document["domain"], document["task_id"]
    if domain not in domains:
        yield f"$.domain: {domain!r} is not one of {', '.join(domains)} (`--domains` adds yours)"
    if not task_id.startswith(f"{domain}-"):
        yield f"$.task_id: {task_id[:80]!r} does not begin with '{domain}-'"


def _about_actions(actions: list[Json], metadata: Json) -> Iterator[str]:
    if metadata["start_ts"] > metadata["end_ts"]:
        yield "$.metadata: it ends (end_ts) before it starts (start_ts)"
    before = metadata["start_ts"]
    for number, action in enumerate(actions, 1):
        place = f"$.actions[{number - 1}]"
        if action["step"] != number:
            yield f"{place}.step: {action['step']} where {number} is due"
        if action["tool"] == "unknown" and not action["input"] and not action["output"]:
            yield f"{place}: nothing is known of it"
        if (ts := action.get("ts")) is not None:
            if not before <= ts <= metadata["end_ts"]:
                yield f"{place}.ts: {ts} is out of order"
            before = max(before, ts)


def _about_numbers(value: Any, place: str) -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{place}: {value} is not a number"
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _about_numbers(inner, f"{place}.{name}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _about_numbers(inner, f"{place}[{index}]")


def first_question(messages: list[Message]) -> str | None:
    return next((text_of(message) for message in messages if message.get("role") == "user"), None)


def _finalized(actions: list[Json], answer: str) -> list[Json]:
    if not answer or (actions and actions[-1]["tool"] == FINALIZE):
        return actions
    last = _action(len(actions) + 1, FINALIZE, {}, answer)
    if actions and "ts" in actions[-1]:
        last["ts"] = actions[-1]["ts"]
    return [*actions, last]


def _action(step: int, tool: str, input: Any, output: Any) -> Json:
    return {"step": step, "tool": tool, "input": input, "output": output}


def _sequences(trajectory: Trajectory, tokens: bool) -> Iterator[Json]:
    rows = trajectory.sequences
    others = {other.agent for other in trajectory.others}
    main = next((row.agent for row in rows if row.agent not in others), None)
    yield {"agent": main, "trained": True, "messages": trajectory.messages}
    for other in trajectory.others:
        yield {"agent": other.agent, "trained": other.trained, "messages": other.messages}
    for row in rows if tokens else ():
        yield {
            "agent": row.agent,
            "trained": True,
            "messages": [],
            "tokens": row.tokens.tolist(),
            "masks": row.mask.tolist(),
            "logprobs": [float(logprob) for logprob in row.logprobs],
        }


SOLVED = 0.999
"""Rewards from here on count as full (floats)."""

_TRACE_SCHEMA = Path(__file__).with_name("trace.schema.json")


def trace_of(rollout: StoredRollout, *, label: str, number: int) -> Json:
    """Returns `rollout` as a trace: the one in `output["trace"]`, else one made of its actions."""
    output = rollout.output
    if isinstance(output, dict) and not problems_of_trace(output.get("trace")):
        return {**output["trace"], "label": label}
    document = unified_of(rollout)
    facts = document["metadata"]
    begin = datetime.fromtimestamp(facts["start_ts"], UTC)
    steps = [
        {"i": number, **step}
        for number, step in enumerate(_steps(document["actions"], rollout.limit))
    ]
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
    return _against(_TRACE_SCHEMA, document) or [
        *_about_steps(document["steps"]),
        *_about_outcome(document),
    ]


def unified_of_trace(trace: Json, *, domain: str = "swe") -> Json:
    """Returns a valid trace as a unified trajectory: thoughts are `reason`, a call and its result
    one action, the final text `finalize`, an error an action of that name."""
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
            yield {"type": "thought", "text": json_text(output)}
        elif tool == FINALIZE:
            if not limit:
                yield {"type": "final", "text": json_text(output)}
        else:
            args = input if isinstance(input, dict) else {"input": input}
            source = json.dumps({"tool": tool, "args": args}, ensure_ascii=False)
            yield {"type": "tool_call", "text": source, "tool": tool, "args": args}
            failed = {"error": action["error"]} if action.get("error") else {}
            said = failed["error"] if failed and output is None else output
            yield {"type": "tool_result", "text": json_text(said), **failed}
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


def _outcome(steps: list[Json], seconds: float) -> Json:
    types = [step["type"] for step in steps]
    return {
        "num_steps": len(types),
        "elapsed_seconds": round(max(0.0, seconds), 3),
        "completed": types[-1:] == ["final"],
        "error": "error" in types,
    }


def json_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _seconds(timestamp: str) -> float:
    moment = datetime.fromisoformat(timestamp)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


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
