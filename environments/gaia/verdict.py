"""The score of a rollout: its answer against the truth, and how it came there. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any

from envserver import Result, Score, Task

from .rubric import Facts, Weights, fold, items
from .scoring import extract_answer, question_scorer

MALFORMED = frozenset({"parsing"})
"""Kinds of errors of steps that could not be read."""


def judge(
    task: Task, result: Result, weights: Weights, limits: tuple[int, int], *, drops: bool = False
) -> Score:
    """The score.

    Args:
        limits: of model calls and of sampled tokens; what was used was counted by the proxy.
        drops: a rollout without an answer has no reward.
    """
    output = result.output if isinstance(result.output, dict) else {}
    answer = extract_answer(output.get("answer"))
    facts = _facts(task, result, output, answer, limits)
    found = items(facts, weights)
    folded = fold(found, weights)
    unscored = drops and answer is None
    return Score(
        reward=None if unscored else max(0.0, folded),
        components=dataclasses.asdict(found),
        metrics={
            "folded": folded,
            "level": float(task.hidden["level"]),
            "answered": float(answer is not None),
            "agent_steps": float(facts.steps),
        },
    )


def _facts(
    task: Task, result: Result, output: dict[str, Any], answer: str | None, limits: tuple[int, int]
) -> Facts:
    kinds = [_error_kind(step) for step in _steps(output)]
    malformed = sum(kind in MALFORMED for kind in kinds)
    return Facts(
        correct=answer is not None and question_scorer(answer, str(task.hidden["answer"])),
        turns=result.turns,
        turn_limit=limits[0],
        tokens=result.completion_tokens,
        token_limit=limits[1],
        steps=len(kinds),
        malformed=malformed,
        failed=sum(kind is not None for kind in kinds) - malformed,
        grounded=answer is not None and _was_observed(answer, output),
    )


def _steps(output: dict[str, Any]) -> list[dict[str, Any]]:
    steps = output.get("steps")
    return [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []


def _error_kind(step: dict[str, Any]) -> str | None:
    error = step.get("error")
    kind = error.get("kind") if isinstance(error, dict) else None
    return kind if isinstance(kind, str) else None


def _was_observed(answer: str, output: dict[str, Any]) -> bool:
    """Whether each part of the answer stood in something that the agent saw."""
    seen = " ".join(str(step.get("observation", "")) for step in _steps(output)).casefold()
    return all(part.strip().casefold() in seen for part in answer.split(","))
