"""Scores one conversation: the reward by tau2-bench's rule or strictly, and metrics.

Metrics, for people and for shaping: `gold_writes_done` (share of the expected changes that were
made), `extra_writes` (unexpected calls that changed something), `unconfirmed_writes` (changes
without the customer's yes), `tool_errors`, and how the conversation ended.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from pydantic import BaseModel, ValidationError

from envserver import Judge, Score

from .domains.world import Domain
from .episodes import COMPLETE, OUT_OF_SCOPE, TRANSFER
from .evaluation import (
    Evaluation,
    EvaluationError,
    EvaluationType,
    MissingVerdicts,
    Strictness,
    evaluate,
    same_call,
    unconfirmed_writes,
)
from .prompts import judge_messages
from .tasks import TauMessage, TauTask, calls_with_results


def score_conversation(
    domain: Domain,
    task: TauTask,
    messages: Sequence[TauMessage],
    ending: str,
    *,
    evaluation_type: EvaluationType = "all",
    nl_verdicts: Sequence[bool] | None = None,
    strictness: Strictness = Strictness.UPSTREAM,
) -> Score:
    """Scores a whole conversation.

    If a judge's verdicts are needed and missing the reward is None; if the recorded results cannot
    be those of the calls, the score is an error.
    """
    try:
        found = evaluate(
            domain,
            task,
            messages,
            ending,
            evaluation_type=evaluation_type,
            nl_verdicts=nl_verdicts,
            strictness=strictness,
        )
    except MissingVerdicts:
        return Score(reward=None, metrics={"missing_verdicts": 1.0})
    except EvaluationError as error:
        return Score(reward=None, error=f"The conversation cannot have happened so: {error}")
    metrics = _metrics(domain, task, messages, found)
    metrics |= {"complete": float(ending in COMPLETE), f"ended_{ending}": 1.0}
    components = {name.lower(): value for name, value in found.components.items()}
    return Score(reward=found.reward, components=components, metrics=metrics)


def _metrics(
    domain: Domain, task: TauTask, messages: Sequence[TauMessage], found: Evaluation
) -> dict[str, float]:
    world = domain.world()

    def mutates(name: str) -> bool:
        tool = world.tool(name)
        return tool is not None and tool.mutates

    made = list(calls_with_results(messages))
    metrics = {
        "messages": float(len(messages)),
        "tool_calls": float(len(made)),
        "tool_errors": float(sum(bool(result.get("error")) for _, result in made)),
        "upstream_crashes": float(found.upstream_error is not None),
    }
    criteria = task.evaluation_criteria
    gold = [
        action for action in (criteria.actions if criteria else None) or () if mutates(action.name)
    ]
    writes = [call for call, result in made if not result.get("error") and mutates(call["name"])]
    metrics["unconfirmed_writes"] = float(len(unconfirmed_writes(messages, mutates)))
    same = [[same_call(a, call, Strictness.STRICT) for call in writes] for a in gold]
    expected = sum(map(any, zip(*same, strict=True)))
    metrics["extra_writes"] = float(len(writes) - expected)
    if gold:
        metrics["gold_writes_done"] = sum(map(any, same)) / len(gold)
    last = next((m for m in reversed(messages) if m["role"] == "user"), {})
    content = last.get("content") or ""
    metrics["transferred"] = float(TRANSFER in content)
    metrics["out_of_scope"] = float(OUT_OF_SCOPE in content)
    return metrics


class _Verdict(BaseModel):
    met: bool


class _Verdicts(BaseModel):
    results: list[_Verdict]


def verdicts(judge: Judge, assertions: Sequence[str], messages: Sequence[TauMessage]) -> list[bool]:
    """Returns whether each assertion is met; without assertions no model is called."""
    if not assertions:
        return []
    asked = judge_messages(assertions, messages)
    return judge.ask_blocking(asked, lambda text: read_verdicts(text, len(assertions)))


def read_verdicts(text: str, count: int) -> list[bool]:
    """Parses the verdicts in an answer; raises ValueError if they are invalid or not `count`."""
    start, end = text.find("{"), text.rfind("}")
    try:
        read = _Verdicts.model_validate(json.loads(text[start : end + 1]), strict=True)
    except (ValidationError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if len(read.results) != count:
        raise ValueError(f"{len(read.results)} verdicts, not {count}")
    return [one.met for one in read.results]
