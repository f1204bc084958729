"""Scores a rollout: 1 for a correct answer, else 0. The answer is the argument of `finish`, else
the last balanced box of the visible text; a letter is found by the rules for options."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from envserver_environments.answers import (
    arguments_of,
    choice_index,
    last_boxed,
    last_reply,
    option_index,
    text_in,
)
from envserver_tools.calling import visible_text

from envserver import Result, Score, Task

from . import procedural
from .agent import finish
from .data_sets import MAX_ANSWER_CHARACTERS
from .literals import is_number_literal
from .verification import Verdict, compare

_HASHES = re.compile(r"####\s*\S[^\n]*\s*\Z")


@dataclass(frozen=True)
class ScoringRules:
    """Rules for a correct answer, beyond equality."""

    literal: bool | None = None  # numbers must be written out; None: if the data set's answers are
    lenient: bool = False  # accept plain expressions
    tool_error_penalty: float = 0.0  # deducted per failed tool call, down to 0
    partial_credit: bool = False  # accept partial scores of the generators' scorers


@dataclass(frozen=True)
class ModelAnswer:
    """A rollout's final output: the argument of `finish`, and the last text."""

    finish: str | None
    text: str

    @property
    def answer(self) -> str | None:
        if self.finish is not None:
            boxed = last_boxed(self.finish)
            return self.finish if boxed is None else boxed
        seen = visible_text(self.text)
        return None if seen is None else last_boxed(seen)


def score_rollout(task: Task, result: Result, rules: ScoringRules) -> Score:
    tool_errors = float(result.metrics.get("tool_errors", 0.0))
    metrics = {"tool_errors": tool_errors, "truncated": float(result.truncated)}
    if metrics["truncated"]:
        return Score(reward=0.0, components={"correct": 0.0}, metrics=metrics)
    correct = _correctness(task, read_answer(result), rules, metrics)
    if correct is None:
        return Score(reward=None, metrics=metrics)
    reward = max(0.0, correct - rules.tool_error_penalty * tool_errors)
    return Score(reward=reward, components={"correct": correct}, metrics=metrics)


def read_answer(result: Result) -> ModelAnswer:
    """Reads the answer from the rollout's output or, if there is none, from the conversation."""
    output = result.output
    if isinstance(output, dict):
        return ModelAnswer(text_in(output.get("answer")), text_in(output.get("text")) or "")
    if isinstance(output, str):
        return ModelAnswer(None, output)
    return last_answer(result.messages)


def last_answer(messages: list[dict[str, Any]]) -> ModelAnswer:
    message = last_reply(messages)
    finished = arguments_of(finish, message)
    answer = None if finished is None else str(finished["answer"])
    return ModelAnswer(answer, text_in(message.get("content")) or "")


def _correctness(
    task: Task, given: ModelAnswer, rules: ScoringRules, metrics: dict[str, float]
) -> float | None:
    """Returns 1.0 or 0.0 (or a generator's own score), or None if the gold is unusable."""
    if task.hidden["kind"] == "letter":
        options = task.public["options"]
        if given.finish is None:
            index = choice_index(given.text, options)
        else:
            index = option_index(given.answer or "", options)
        metrics["answered"] = float(index is not None)
        return float(index == ord(task.hidden["answer"]) - ord("A"))
    answer = (given.answer or "").strip()
    metrics["answered"] = float(bool(answer))
    if not answer and _HASHES.search(given.text):
        metrics["no_box_but_hashes"] = 1.0  # as GSM8K's own solutions end, which is not paid
    if len(answer) > MAX_ANSWER_CHARACTERS:
        metrics["too_long"] = 1.0
    if not answer or len(answer) > MAX_ANSWER_CHARACTERS:
        return 0.0
    if task.hidden["kind"] == "procedural":
        return procedural.score_entry(
            task.hidden["generator"],
            {**task.hidden["entry"], "question": task.public["question"]},
            answer,
            partial_credit=rules.partial_credit,
        )
    literal = task.hidden["kind"] == "number" if rules.literal is None else rules.literal
    repeated = answer == task.hidden["answer"].strip()
    if literal and not repeated and not is_number_literal(answer):
        metrics["not_literal"] = 1.0
        return 0.0
    question = task.public.get("question", "")
    verdict = compare(task.hidden["answer"], answer, lenient=rules.lenient, question=question)
    if verdict is Verdict.BAD_GOLD:
        metrics["bad_gold"] = 1.0
        return None
    if verdict is Verdict.KILLED:
        metrics["verification_killed"] = 1.0
    return float(verdict is Verdict.EQUAL)
