"""Unified trajectories and traces as groups: a rollout for each document.

In: documents of one task that follow each other. Out: a line as `envserver process` writes it,
without the tokens that nobody wrote down.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from envserver_records.errors import InputError

from ..export.traces import problems_of_trace, unified_of_trace
from ..export.unified import FINALIZE
from ..formats.atropos import NOT_TRAINED

Json = dict[str, Any]

_PLAIN: Final = ("hooks", "egress", "flags", "components")


def unified_document(value: Any, place: str) -> Json:
    """Returns a document as a unified trajectory.
    Raises InputError: it is neither a unified trajectory nor a trace.
    """
    if isinstance(value, dict):
        if isinstance(value.get("actions"), list) and isinstance(value.get("metadata"), dict):
            return value
        if "steps" in value and "outcome" in value:
            problems = problems_of_trace(value)
            if not problems:
                return unified_of_trace(value, domain=_domain(value))
            raise InputError(f"{place} is not a valid trace: {problems[0]}.", place=place)
    raise InputError(
        f"{place} is not a group, a unified trajectory or a trace.",
        hint="`envserver view` reads what process, evaluate and export write.",
        place=place,
    )


def task_of(document: Json) -> tuple[str, str]:
    """Returns what tells whether two documents belong to one group: the group, or the task."""
    facts = document["metadata"]
    return str(document.get("domain") or ""), str(facts.get("group_id") or _task(document))


def group_of_documents(documents: Sequence[Json], group_id: str) -> Json:
    """Returns the line of a group with a rollout for each document."""
    line: Json = {"tokens": [], "masks": [], "scores": [], "inference_logprobs": []}
    rollouts = [_rollout(one, number, group_id, line) for number, one in enumerate(documents)]
    first = documents[0]
    facts = first["metadata"]
    line["envserver"] = {
        "group_id": str(facts.get("group_id") or group_id),
        "env": str(first.get("domain") or "unknown"),
        "task_id": _task(first),
        "split": str(facts.get("split") or "train"),
        "seed": facts.get("seed") or 0,
        "model": str(facts.get("model") or ""),
        "created_at": float(facts.get("end_ts") or 0.0),
        "rollouts": rollouts,
    }
    return line


def _task(document: Json) -> str:
    facts = document["metadata"]
    return str(facts.get("task_id") or facts.get("scenario") or document.get("task_id") or "")


def _domain(trace: Json) -> str:
    return str((trace.get("metadata") or {}).get("env") or "trace")


def _rollout(document: Json, number: int, group_id: str, line: Json) -> Json:
    facts = document["metadata"]
    conversations = [one for one in facts.get("sequences") or () if one.get("messages")]
    rows = [one for one in facts.get("sequences") or () if one.get("tokens")] or [{}]
    start = len(line["tokens"])
    for row in rows:
        _add_row(line, row, facts.get("reward"))
    seconds = max(0.0, float(facts.get("end_ts") or 0) - float(facts.get("start_ts") or 0))
    actions = document["actions"]
    return {
        "rollout_id": str(
            facts.get("rollout_id") or facts.get("run_id") or f"{group_id}-r{number}"
        ),
        "rows": list(range(start, start + len(rows))),
        "agents": [row.get("agent") for row in rows],
        "reward": facts.get("reward"),
        "output": document.get("final_answer"),
        "finish_reason": facts.get("finish_reason"),
        "limit": facts.get("limit"),
        "truncated": facts.get("finish_reason") == "length",
        "turns": facts.get("turns") or sum(one.get("tool") == "reason" for one in actions),
        "messages": conversations[0]["messages"] if conversations else _messages(document),
        "others": [_other(one) for one in conversations[1:]],
        "actions": actions,
        "usage": {"seconds": seconds, "ended_by": facts.get("limit") or "agent"},
        **{name: facts[name] for name in _PLAIN if facts.get(name)},
    }


def _add_row(line: Json, row: Json, reward: float | None) -> None:
    tokens, masks = row.get("tokens") or [], row.get("masks") or []
    line["tokens"].append(tokens)
    line["masks"].append(
        [token if mask else NOT_TRAINED for token, mask in zip(tokens, masks, strict=False)]
    )
    line["inference_logprobs"].append(row.get("logprobs") or [0.0] * len(tokens))
    line["scores"].append(reward or 0.0)


def _other(conversation: Json) -> Json:
    return {
        "agent": conversation.get("agent"),
        "trained": bool(conversation.get("trained", True)),
        "model": "",
        "messages": conversation["messages"],
        "tools": [],
        "turns": sum(one.get("role") == "assistant" for one in conversation["messages"]),
        "completion_tokens": 0,
    }


def _messages(document: Json) -> list[Json]:
    """Returns the conversation that the actions of a document tell."""
    question = document.get("question")
    messages: list[Json] = [{"role": "user", "content": question}] if question else []
    for number, action in enumerate(document["actions"]):
        tool, output = str(action.get("tool")), _text(action.get("output"))
        if action.get("error") and action.get("output") is None:
            output = f"Error: {action['error']}"
        if tool in ("reason", FINALIZE):
            messages.append({"role": "assistant", "content": output})
            continue
        call = {"name": tool, "arguments": _text(action.get("input"))}
        called = {"id": f"call-{number}", "type": "function", "function": call}
        messages.append({"role": "assistant", "content": None, "tool_calls": [called]})
        messages.append({"role": "tool", "tool_call_id": called["id"], "content": output})
    return messages


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
