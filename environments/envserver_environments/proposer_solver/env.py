"""The environment `proposer_solver`: one agent makes a problem, the other solves it several times.

The calculator knows the answer. The solver is paid for each right answer, the proposer
`4 p (1 - p)`, most where the solver is right half of the time: a problem that is always or never
solved teaches nothing ("Absolute Zero", Zhao et al., arXiv 2505.03335, section 3.1).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from envserver_tools.calculator import calculate

from envserver import (
    AgentRole,
    Environment,
    KnownResult,
    Message,
    PublicTask,
    Result,
    Rollout,
    Score,
    Split,
    Task,
    TurnReward,
)

PROPOSER, SOLVER = "proposer", "solver"
_ALLOWED = re.compile(r"[0-9+\-* ()]+")
_ANSWER = re.compile(r"-?\d+")
_MOST_DIGITS = 100
"""Longest number that is read, in digits; Python refuses to read thousands."""


class ProposerSolver(Environment):
    """Self-play in which one agent makes problems for the other."""

    name = "proposer_solver"
    exact_demonstrations = True
    demonstrations_solve = False
    solved_at = 0.75  # both agents' mean where the solver is right half of the time

    class Config(Environment.Config):
        attempts: int = 4
        """How often the solver tries each problem."""
        max_characters: int = 24
        """The longest problem."""
        max_turns: int = 64

    def agents(self) -> Mapping[str, AgentRole]:
        return {PROPOSER: AgentRole(), SOLVER: AgentRole()}

    def tasks(self, split: Split) -> Iterator[Task]:
        rng = random.Random(f"proposer-solver-{self.config.seed}-{split}")
        for number in range(1000):
            use = [rng.randrange(2, 100), rng.randrange(2, 100)]
            public = {"use": use, "max_characters": self.config.max_characters}
            yield Task(f"{split}-{number}", public)

    async def rollout(self, task: PublicTask, run: Rollout) -> dict[str, Any]:
        first, second = task.public["use"]
        request = (
            f"Write an arithmetic problem that uses {first} and {second}: numbers, + - * and "
            f"brackets only, at most {task.public['max_characters']} characters. It should be so "
            "hard that a solver is right half of the time. Write the expression and nothing else."
        )
        problem = (await run.chat([{"role": "user", "content": request}], agent=PROPOSER)).content
        if result_of(problem, task.public) is None:
            return {"problem": problem, "answers": []}
        tried: list[Message] = [{"role": "user", "content": f"{problem.strip()} = ?"}]
        replies = [await run.chat(tried, agent=SOLVER) for _ in range(self.config.attempts)]
        return {"problem": problem, "answers": [reply.content for reply in replies]}

    def score(self, task: Task, result: Result) -> Score:
        output = result.output if isinstance(result.output, dict) else {}
        problem, answers = output.get("problem"), output.get("answers")
        truth = result_of(problem, task.public) if isinstance(problem, str) else None
        if truth is None or not isinstance(answers, list):
            return _scored(0.0, [], valid=False)
        right = [answer_of(answer) == truth for answer in answers[: self.config.attempts]]
        share = sum(right) / self.config.attempts
        return _scored(4 * share * (1 - share), [solved / self.config.attempts for solved in right])

    def demonstration(self, task: Task) -> Mapping[str, list[Message]]:
        first, second = task.public["use"]
        answers = [first * second, first * second, first + second, first - second]
        return {
            PROPOSER: [{"role": "assistant", "content": f"{first} * {second}"}],
            SOLVER: [{"role": "assistant", "content": str(answer)} for answer in answers],
        }

    def known_results(self, task: Task) -> Iterator[KnownResult]:
        first, second = task.public["use"]
        problem, truth, count = f"{first} * {second}", str(first * second), self.config.attempts
        for name, right in (("half are right", count // 2), ("all are right", count)):
            answers = [truth] * right + ["-1"] * (count - right)
            share = right / count
            yield _known(name, problem, answers, (4 * share * (1 - share) + share) / 2)
        yield _known("none is right", problem, ["-1"] * count, 0.0)
        half = [truth] * (count // 2) + ["-1"] * (count - count // 2)
        yield _known("a problem without the numbers", "1 + 1", half, 0.0)
        yield _known("a riddle", f"{first} to the {second}", half, 0.0)
        yield _known("too long", f"{first} * {second}" + " + 1" * 99, half, 0.0)


def result_of(problem: str, public: Mapping[str, Any]) -> int | None:
    text = problem.strip()
    if len(text) > public["max_characters"] or not _ALLOWED.fullmatch(text) or "**" in text:
        return None
    digits = re.findall(r"\d+", text)
    if any(len(number) > _MOST_DIGITS for number in digits):
        return None
    numbers = list(map(int, digits))
    if any(numbers.count(number) < public["use"].count(number) for number in public["use"]):
        return None
    result = calculate(text)
    return int(result) if _ANSWER.fullmatch(result) and len(result) <= _MOST_DIGITS else None


def answer_of(answer: object) -> int | None:
    found = _ANSWER.findall(answer) if isinstance(answer, str) else []
    return int(found[-1]) if found and len(found[-1]) <= _MOST_DIGITS else None


def _scored(proposer: float, solver: list[float], *, valid: bool = True) -> Score:
    """Returns the score; its single number is the mean of both agents' rewards."""
    return Score(
        reward=proposer / 2,
        rewards={PROPOSER: proposer, SOLVER: 0.0},
        turns=[TurnReward(turn, value, SOLVER) for turn, value in enumerate(solver)],
        metrics={"valid": float(valid), "solved": sum(solver)},
    )


def _known(name: str, problem: str, answers: list[str], reward: float) -> KnownResult:
    output = {"problem": problem, "answers": answers}
    return KnownResult(name, Result(output=output), least=reward, most=reward)
