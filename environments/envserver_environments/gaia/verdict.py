"""The score of a rollout: its answer against the truth, and how it came there. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from envserver_tools.web import LEAK_SEEN

from envserver import Result, Score, Task

from .rubric import Facts, Weights, fold, items
from .scoring import extract_answer, is_too_long, leaderboard_verdict, question_scorer
from .trail import Trail, trail_of

_TELLING_CHARACTERS = 16
"""An author's id of this length occurs only in copies of the data set."""

Unfinished = Literal["score", "drop"]
Contaminated = Literal["drop", "zero", "score"]


@dataclass(frozen=True)
class Terms:
    """Settings of the score.

    Args:
        turns, tokens: limits of model calls and of sampled tokens.
        unfinished: rollouts without an answer: scored as wrong, or without a reward.
        contaminated: rollouts that saw a page revealing the answer: without a reward, scored as
        wrong, or scored as usual.
    """

    weights: Weights
    turns: int
    tokens: int
    unfinished: Unfinished = "score"
    contaminated: Contaminated = "drop"


def judge(task: Task, result: Result, terms: Terms) -> Score:
    """Returns the score, from the usage and the observations that the proxy recorded."""
    output = result.output if isinstance(result.output, dict) else {}
    submitted = output.get("answer")
    answer, too_long = extract_answer(submitted), is_too_long(submitted)
    answered = answer is not None or too_long
    trail = trail_of(result.messages, result.turns)
    facts = _facts(task, result, answer, trail, terms)
    found = items(facts, terms.weights)
    folded = fold(found, terms.weights)
    leaked = _was_leaked(task, result, trail)
    return Score(
        reward=_reward(folded, terms, answered=answered, leaked=leaked),
        components=dataclasses.asdict(found),
        metrics={
            "folded": folded,
            "leaderboard_correct": float(
                leaderboard_verdict(submitted, str(task.hidden["answer"]))
            ),
            "level": float(task.hidden["level"]),
            "answered": float(answered),
            "too_long": float(too_long),
            "agent_steps": float(facts.steps),
            "contaminated": float(leaked),
        },
    )


def _reward(folded: float, terms: Terms, *, answered: bool, leaked: bool) -> float | None:
    if leaked and terms.contaminated != "score":
        return None if terms.contaminated == "drop" else 0.0
    if not answered and terms.unfinished == "drop":
        return None
    return max(0.0, folded)


def _facts(task: Task, result: Result, answer: str | None, trail: Trail, terms: Terms) -> Facts:
    return Facts(
        correct=answer is not None and question_scorer(answer, str(task.hidden["answer"])),
        turns=result.turns,
        turn_limit=terms.turns,
        tokens=result.completion_tokens,
        token_limit=terms.tokens,
        steps=trail.steps,
        malformed=trail.malformed,
        failed=trail.failed,
        grounded=answer is not None and _was_observed(answer, trail.observed),
    )


def _was_leaked(task: Task, result: Result, trail: Trail) -> bool:
    """Returns whether the agent saw a copy of its task (the web service or its id tells)."""
    name = str(task.hidden.get("task_id") or "")
    named = len(name) >= _TELLING_CHARACTERS and name.casefold() in trail.observed.casefold()
    return named or LEAK_SEEN in result.flags


def _was_observed(answer: str, observed: str) -> bool:
    """Returns whether each part of the answer occurred in an observation."""
    seen = observed.casefold()
    return all(part.strip().casefold() in seen for part in answer.split(","))
