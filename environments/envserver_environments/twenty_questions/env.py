"""The environment `twenty_questions`: an agent asks about a thing that only the server knows.

Each turn is one line, `ask WORD` or `guess THING`. A question is paid half of the share of the
uncertainty that it takes away (in bits), the right guess the other half. So the rewards of a
rollout are in [0, 1]: a guess by luck gets the half, a question whose answer was known nothing.
"""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

from envserver_environments.rows import copied
from envserver_records.tasks import Json

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

SHARE = 0.5
"""The part of the reward that questions can earn; the right guess earns the rest."""
_KINDS = ("ask", "guess")
_RULES = """I think of one of these things: {things}.
Find out which. In each turn write one line:
ask WORD      with a word of: {words}
guess THING   ends the game"""


class TwentyQuestions(Environment):
    """Twenty questions about a secret on the server, paid by turn."""

    name = "twenty_questions"
    exact_demonstrations = True

    class Config(Environment.Config):
        max_turns: int = 20
        """Questions and guess together."""
        things_path: Path | None = None
        """JSONL file of {"thing": "cat", "is": ["alive", ...]}; unset: 42 things."""

    @classmethod
    def write_sample(cls, folder: Path) -> Mapping[str, Any]:
        return copied(Path(__file__).parent / "data", folder, {"things_path": "sample.jsonl"})

    def tasks(self, split: Split) -> Iterator[Task]:
        known = read_things(self.config.things_path)
        words = sorted(set().union(*known.values()))
        public = {"things": sorted(known), "words": words}
        rng = random.Random(f"twenty-questions-{self.config.seed}-{split}")
        for number, thing in enumerate(rng.sample(sorted(known), len(known))):
            yield Task(f"secret-{number}", public, {"thing": thing})

    def services(self) -> AbstractAsyncContextManager[Mapping[str, Service]]:
        known = read_things(self.config.things_path)
        return nullcontext(Services({"ask": ask}, state=lambda task: Game(task, known)))

    async def rollout(self, task: PublicTask, run: Rollout) -> Json:
        rules = _RULES.format(
            things=", ".join(task.public["things"]), words=", ".join(task.public["words"])
        )
        messages: list[Message] = [{"role": "user", "content": rules}]
        while True:
            try:
                reply = await run.chat(messages)
            except LimitReached:  # all turns are used up: the questions keep their pay
                return {"guess": None}
            kind, what = said(reply.content)
            if kind == "guess":
                return {"guess": what}
            outcome = await run.call_tool("ask", {"word": what})
            run.reward(outcome["gain"])
            messages += [reply.message, {"role": "user", "content": outcome["answer"]}]

    def score(self, task: Task, result: Result) -> Score:
        guess = result.output.get("guess") if isinstance(result.output, dict) else None
        right = guess == task.hidden["thing"]
        return Score(reward=(1 - SHARE) * right, metrics={"right": float(right)})

    def demonstration(self, task: Task) -> list[Message]:
        """Returns the questions that halve what is left, and the guess."""
        game = Game(task, read_things(self.config.things_path))
        lines = []
        while len(game.left) > 1:
            word = min(task.public["words"], key=game.imbalance)
            lines.append(f"ask {word}")
            game.ask(word)
        lines.append(f"guess {game.left[0]}")
        return [{"role": "assistant", "content": line} for line in lines]

    def known_results(self, task: Task) -> Iterator[KnownResult]:
        half = 1 - SHARE  # the other half is paid while the questions are asked
        gold = Result(output={"guess": task.hidden["thing"]})
        yield KnownResult("the thing", gold, least=half, most=half)
        other = next(thing for thing in task.public["things"] if thing != task.hidden["thing"])
        yield KnownResult("another thing", Result(output={"guess": other}))
        everything = ", ".join(task.public["things"])
        yield KnownResult("all things at once", Result(output={"guess": everything}))


class Game:
    """One secret, and the things that the answers so far leave over."""

    def __init__(self, task: Task, known: Mapping[str, frozenset[str]]) -> None:
        self._thing = task.hidden["thing"]
        self._known = known
        self._bits = math.log2(len(known))
        self.left = sorted(known)

    def ask(self, word: str) -> tuple[str, float]:
        """Returns "yes" or "no", and the pay of the question."""
        answer = word in self._known[self._thing]
        before = len(self.left)
        self.left = [thing for thing in self.left if (word in self._known[thing]) == answer]
        return ("yes" if answer else "no"), SHARE * math.log2(before / len(self.left)) / self._bits

    def imbalance(self, word: str) -> float:
        """Returns how far `word` is from halving what is left."""
        return abs(sum(word in self._known[thing] for thing in self.left) - len(self.left) / 2)


async def ask(arguments: Json, caller: Caller) -> Json:
    """Answers a question; a text that is not a question gets an error and no reward."""
    word = arguments.get("word")
    if word not in caller.task.public["words"]:
        return {"answer": "Write `ask WORD` or `guess THING`, with a word that I named.", "gain": 0}
    answer, gain = caller.state.ask(word)
    return {"answer": answer, "gain": gain}


def said(text: str) -> tuple[str, str]:
    for line in reversed(text.lower().splitlines()):
        match line.split(maxsplit=1):
            case [kind, what] if kind in _KINDS:
                what = what.rstrip()
                return kind, (what[:-1] if what[-1] in ".?!" else what).rstrip() or what
    return "ask", ""


@functools.cache
def read_things(path: Path | None) -> Mapping[str, frozenset[str]]:
    place = path or Path(__file__).parent / "data" / "sample.jsonl"
    rows = map(json.loads, place.read_text(encoding="utf-8").splitlines())
    return {row["thing"].lower(): frozenset(word.lower() for word in row["is"]) for row in rows}
