"""The environment `my_env`: a game against the server, which keeps the secret."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

from envserver import (
    Caller,
    Environment,
    KnownResult,
    LimitReached,
    Message,
    PublicTask,
    Result,
    Rollout,
    Score,
    Service,
    Services,
    Split,
    Task,
)

ROWS = Path(__file__).with_name("rows.jsonl")


class MyEnv(Environment):
    """Guess a number of the server; the sooner, the better."""

    name = "my_env"
    exact_demonstrations = True  # the simulated engine says nothing before the answer

    class Config(Environment.Config):
        max_turns: int = 10
        """Guesses."""

    def tasks(self, split: Split) -> Iterator[Task]:
        for number, line in enumerate(ROWS.read_text().splitlines()):
            row = json.loads(line)
            yield Task(f"row-{number}", {"most": row["most"]}, {"secret": row["secret"]})

    def services(self) -> AbstractAsyncContextManager[Mapping[str, Service]]:
        """The game runs on the server: the worker never sees the secret."""
        return nullcontext(Services({"guess": guess}, state=lambda task: Game(task)))

    async def rollout(self, task: PublicTask, run: Rollout) -> dict[str, Any]:
        rules = f"Guess my number, from 1 to {task.public['most']}. Write one number."
        messages: list[Message] = [{"role": "user", "content": rules}]
        while True:
            try:
                reply = await run.chat(messages)
            except LimitReached:  # all guesses are used up
                return {"guess": None}
            numbers = re.findall(r"\d+", reply.content)
            number = int(numbers[-1][:9]) if numbers else 0
            answer = await run.call_tool("guess", {"number": number})
            if answer == "right":
                return {"guess": number}
            messages += [reply.message, {"role": "user", "content": f"{answer} Guess again."}]

    def score(self, task: Task, result: Result) -> Score:
        guess = result.output.get("guess") if isinstance(result.output, dict) else None
        right = type(guess) is int and guess == task.hidden["secret"]
        if not right:
            return Score(reward=0.0)
        late = max(result.turns - len(_bisection(task)), 0)
        return Score(reward=max(1.0 - 0.1 * late, 0.1), metrics={"guesses": result.turns})

    def demonstration(self, task: Task) -> list[Message]:
        """Returns the guesses that halve what is left."""
        return [{"role": "assistant", "content": str(guess)} for guess in _bisection(task)]

    def known_results(self, task: Task) -> Iterator[KnownResult]:
        """Yields results for `envserver check`: the right one, and cheats that must not pay."""
        secret = task.hidden["secret"]
        yield KnownResult("at once", Result(output={"guess": secret}, turns=1), 1.0, 1.0)
        yield KnownResult("late", Result(output={"guess": secret}, turns=99), 0.1, 0.1)
        yield KnownResult("another number", Result(output={"guess": secret + 1}, turns=1))


class Game:
    """One secret number."""

    def __init__(self, task: Task) -> None:
        self.secret: int = task.hidden["secret"]

    def hint(self, number: int) -> str:
        if number == self.secret:
            return "right"
        return "It is higher." if number < self.secret else "It is lower."


async def guess(arguments: dict[str, Any], caller: Caller) -> str:
    """Says how the secret compares with a number."""
    answer: str = caller.state.hint(int(arguments["number"]))
    return answer


def _bisection(task: Task) -> list[int]:
    low, high = 1, task.public["most"]
    guesses: list[int] = []
    while not guesses or guesses[-1] != task.hidden["secret"]:
        guesses.append((low + high) // 2)
        if guesses[-1] < task.hidden["secret"]:
            low = guesses[-1] + 1
        else:
            high = guesses[-1] - 1
    return guesses
