"""Converts a trajectory in another project's form to a unified one. Pure.

In: any JSON of steps or of messages. Out: a unified trajectory with everything it says, or a
`ValueError` with the reason. Known keys:

    question      task, question, problem, prompt, query, instruction, title; at the top or deeper
    final_answer  final_answer, final, answer, solution, result, completion; else the assistant's
                  last message
    actions       actions, steps, tool_calls, calls, trajectory; else the calls in its messages
    an action's   tool: tool, name, type; input: input, args, request, arguments; output: output,
                  response, observation, result
    metadata      start_ts, end_ts, model, seed, reward, under their usual names

Everything else is kept: of an action beside its own keys, of the document in `metadata.raw`. A file
with an action that has no tool, input or output is refused: nothing is invented. The keys that
ojo1996's VideoMultiAgents_HOEY reads (convert_to_out_traj_format.py) are among these, with the same
meaning.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from envserver_records.records import text_of

from envserver.export.unified import SCHEMA_VERSION, actions_of

Json = dict[str, Any]

QUESTION = ("task", "question", "problem", "prompt", "query", "instruction", "title")
FINAL = ("final_answer", "final", "answer", "solution", "result", "completion")
ACTIONS = ("actions", "steps", "tool_calls", "calls", "trajectory")
TOOL = ("tool", "name", "type", "tool_name")
INPUT = ("input", "args", "request", "arguments")
OUTPUT = ("output", "response", "observation", "result")

_STARTED = ("start_ts", "start_time", "started_at", "timestamp", "created_at")
_ENDED = ("end_ts", "end_time", "ended_at", "finished_at")
_MODEL = ("model", "model_name")
_REWARD = ("reward", "score")
_SAYS_NO_ANSWER = (*ACTIONS, *_REWARD, "messages", "metrics", "components")
_OWN = ("schema_version", "task_id", "domain", "messages", "seed")
_ASSISTANTS = ("assistant", "final")
_UNKNOWN = "unknown"


def unified_of_foreign(value: Any, *, task_id: str, domain: str) -> Json:
    """Returns `value` as a unified trajectory.

    Args:
        value: an object, or a list of steps or messages.
        task_id: full id, with its domain.
    """
    document = _document(value)
    messages = _messages(document)
    key = _key_of_actions(document)
    actions = _actions(document[key], key) if key else _actions_in(messages)
    answer = _final(document, messages)
    question = _question(document)
    if not actions and not answer and question is None:
        raise ValueError("it has no steps, no messages, no question and no answer")
    return {
        "schema_version": SCHEMA_VERSION,
        "task_id": task_id,
        "domain": domain,
        "question": question,
        "actions": actions,
        "final_answer": answer,
        "metadata": _metadata(document, messages, actions, key),
    }


def _document(value: Any) -> Json:
    if isinstance(value, dict):
        return value
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        return {"messages": value} if all("role" in one for one in value) else {"steps": value}
    raise ValueError("it is neither an object nor a list of objects")


def _messages(document: Json) -> list[Json]:
    found = document.get("messages")
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _key_of_actions(document: Json) -> str | None:
    """Returns the first key that holds actions."""
    for key in ACTIONS:
        found = document.get(key)
        if isinstance(found, list) and found and all(isinstance(one, dict) for one in found):
            return key
    return None


def _actions(steps: list[Json], key: str) -> list[Json]:
    numbers = [step.get("step") for step in steps]
    if all(type(number) is int for number in numbers):
        steps = sorted(steps, key=lambda step: int(step["step"]))
    return [_action(number, step, f"{key}[{number - 1}]") for number, step in enumerate(steps, 1)]


def _action(number: int, step: Json, place: str) -> Json:
    call = step.get("function")
    said = {**step, **call} if isinstance(call, dict) else step
    tool = next((name for key in TOOL if (name := said.get(key)) and isinstance(name, str)), None)
    given, got = _first(said, INPUT), _first(said, OUTPUT)
    if tool is None and given == "" and isinstance(said.get("action"), str):  # SWE-agent
        tool, given = "bash", {"command": said["action"]}
    if tool in (None, _UNKNOWN) and not given and not got:
        keys = ", ".join(map(str, step)) or "none"
        raise ValueError(f"{place} has no tool, no input and no output (its keys: {keys})")
    rest = {k: v for k, v in said.items() if k not in (*TOOL, *INPUT, *OUTPUT, "step", "function")}
    if "ts" in rest and _seconds(rest["ts"]) is None:
        del rest["ts"]
    return {"step": number, "tool": tool or _UNKNOWN, "input": given, "output": got, **rest}


def _first(step: Json, keys: tuple[str, ...]) -> Any:
    """Returns the first non-empty value of these keys, "" where there is none."""
    return next((step[key] for key in keys if step.get(key) not in (None, "")), "")


def _actions_in(messages: list[Json]) -> list[Json]:
    if any(one.get("tool_calls") for one in messages):
        return actions_of(messages)
    found = [_of_message(one) for one in messages]
    runs = [one for one in found if one is not None]
    return [{"step": n, **one} for n, one in enumerate(runs, 1)] or actions_of(messages)


def _of_message(message: Json) -> Json | None:
    """Returns the action of a tool's message, recognised by its role, tool or command."""
    tool = message.get("tool")
    if not isinstance(tool, str) or not tool:
        tool = "bash" if "cmd" in message else "tool" if message.get("role") == "tool" else None
    if tool is None:
        return None
    given = _first(message, ("cmd", "input", "content"))
    return {"tool": tool, "input": given, "output": _first(message, ("output",))}


def _question(document: Json) -> str | None:
    found = _searched(document, QUESTION, without=())
    return found if found is None else _text(found)


def _final(document: Json, messages: list[Json]) -> str:
    found = _searched(document, FINAL, without=_SAYS_NO_ANSWER)
    if isinstance(found, dict):
        inner = _searched(found, FINAL, without=_SAYS_NO_ANSWER)
        found = found if inner is None else inner
    if found is not None:
        return _text(found)
    said = (text_of(one).strip() for one in reversed(messages) if one.get("role") in _ASSISTANTS)
    return next((text for text in said if text), "")


def _searched(value: Any, keys: Collection[str], *, without: Collection[str]) -> Any:
    """Returns the value of the first of `keys` found: top level before deeper levels, in order.

    Args:
        without: keys below which nothing is searched.
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in keys and inner not in (None, "", [], {}):
                return inner
        values = [inner for key, inner in value.items() if key not in without]
    else:
        values = value if isinstance(value, list) else []
    for inner in values:
        found = _searched(inner, keys, without=without)
        if found is not None:
            return found
    return None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _metadata(document: Json, messages: list[Json], actions: list[Json], key: str | None) -> Json:
    own = document.get("metadata")
    own = own if isinstance(own, dict) else {}
    facts = {**document, **own}
    times = [ts for action in actions if (ts := _seconds(action.get("ts"))) is not None]
    known = [*times, *itertools.islice(_times(facts, _ENDED), 1)]
    started = next(_times(facts, _STARTED), min(known, default=0.0))
    found: Json = {"start_ts": min([started, *times]), "end_ts": max([started, *known])}
    found["source"] = source if isinstance(source := own.get("source"), str) else "converted"
    found |= _model(facts) | _seed(facts) | _reward(facts)
    if messages:
        found["sequences"] = [{"agent": None, "messages": messages}]
    used = {*_OWN, *QUESTION, *FINAL, *_STARTED, *_ENDED, key}
    said = {"question": _question(document), "final_answer": _final(document, messages)}
    rest = {
        name: value
        for name, value in document.items()
        if value not in (None, "", [], {}) and (name not in used or _is_left(name, value, said))
    }
    return found | ({"raw": rest} if rest else {})


def _is_left(name: str, value: Any, said: Mapping[str, Any]) -> bool:
    """Returns whether a key that may hold the question or the answer holds something else."""
    return name in (*QUESTION, *FINAL) and _text(value) not in said.values()


def _times(facts: Json, names: tuple[str, ...]) -> Iterator[float]:
    return (ts for name in names if (ts := _seconds(facts.get(name))) is not None)


def _seconds(value: Any) -> float | None:
    """Returns a number or a date as Unix seconds; a date without a zone is read as UTC."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) else None
    if not isinstance(value, str):
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _model(facts: Json) -> Json:
    for name in _MODEL:
        value = facts.get(name)
        value = value.get("name") if isinstance(value, dict) else value
        if isinstance(value, str) and value:
            return {"model": value}
    return {}


def _seed(facts: Json) -> Json:
    seed = facts.get("seed")
    return {"seed": seed} if type(seed) is int else {}


def _reward(facts: Json) -> Json:
    """Returns the reward; for one with parts the total and the parts."""
    for name in _REWARD:
        value = facts.get(name)
        if isinstance(value, dict):
            parts = {k: v for k, v in value.items() if type(v) in (int, float)}
            total = parts.pop("total", None)
            return {"reward": total, "components": parts}
        if type(value) in (int, float):
            return {"reward": value}
    return {}
