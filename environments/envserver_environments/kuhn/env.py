"""The environment `kuhn`: two agents play Kuhn poker; the server deals and holds the cards.

A player's card reaches the worker when that player is to move, never the other's. Rewards are
chips, by agent, and add up to zero; `reward` is what the first player won.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from envserver_records.tasks import Json

from envserver import (
    AgentRole,
    Caller,
    Environment,
    InputError,
    KnownResult,
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

from .game import ACTIONS, DEALS, ENDED, to_move, won

PLAYERS = ("player0", "player1")
_ACTION = re.compile(r"\b(?:pass|bet)\b")
_FORFEIT = 2.0


class Kuhn(Environment):
    """Kuhn poker in self-play, with known equilibria."""

    reward_range = (-2.0, 2.0)
    solved_at = 1.0
    exact_demonstrations = True
    demonstrations_solve = False

    class Config(Environment.Config):
        group_size: int = 8
        max_turns: int = 2
        """Maximum model calls of each player; a game has no more."""

    def agents(self) -> Mapping[str, AgentRole]:
        return dict.fromkeys(PLAYERS, AgentRole())

    def tasks(self, split: Split) -> Iterator[Task]:
        rng = random.Random(f"kuhn-{self.config.seed}-{split}")
        for number in range(600):
            if number % len(DEALS) == 0:  # every six tasks have every deal once
                deals = rng.sample(DEALS, len(DEALS))
            yield Task(f"kuhn-{number}", {"deal": number}, {"cards": deals[number % len(DEALS)]})

    def services(self) -> AbstractAsyncContextManager[Mapping[str, Service]]:
        return nullcontext(Services({"play": play}, state=lambda task: Table(task.hidden["cards"])))

    async def rollout(self, task: PublicTask, run: Rollout) -> Json:
        moves: list[tuple[str, str, str | None]] = []
        seen = await run.call_tool("play", {})
        while seen["to_move"] is not None:
            reply = await run.chat(question(seen), agent=seen["to_move"])
            cut_off = reply.finish_reason == "length"
            action = None if cut_off else action_of(reply.content)
            moves.append((seen["card"], seen["history"], action))
            if action is None:
                return {"history": seen["history"], "forfeited": True, "moves": moves}
            seen = await run.call_tool("play", {"action": action})
        return {"history": seen["history"], "forfeited": False, "moves": moves}

    def score(self, task: Task, result: Result) -> Score:
        history, forfeited = _game_of(result.output)
        if history is None:
            return Score(reward=0.0, metrics={"unfinished": 1.0})
        if forfeited:  # who names no action loses what a called bet would have lost
            chips = -_FORFEIT if to_move(history) == 0 else _FORFEIT
        else:
            chips = float(won(task.hidden["cards"], history))
        return Score(
            reward=chips,
            rewards=dict(zip(PLAYERS, (chips, -chips), strict=True)),
            metrics={"forfeited": float(forfeited), "bets": float(history.count("b"))},
        )

    def demonstration(self, task: Task) -> Mapping[str, list[Message]]:
        """Returns the moves of players who toss a coin: a start from which self-play can learn."""
        rng = random.Random(f"kuhn-coin-{task.id}-{self.config.seed}")
        moves = [{"role": "assistant", "content": rng.choice(ACTIONS)} for _ in range(4)]
        return {PLAYERS[0]: moves[:2], PLAYERS[1]: moves[2:]}

    def known_results(self, task: Task) -> Iterator[KnownResult]:
        for history in ENDED:
            chips = float(won(task.hidden["cards"], history))
            output = {"history": history, "forfeited": False}
            yield KnownResult(history, Result(output=output), chips, chips)
        for history, chips in (("", -_FORFEIT), ("p", _FORFEIT), ("pb", -_FORFEIT)):
            output = {"history": history, "forfeited": True}
            yield KnownResult("no action is named", Result(output=output), chips, chips)
        yield KnownResult("a game that stops", Result(output={"history": "p", "forfeited": False}))


class Table:
    def __init__(self, cards: list[str]) -> None:
        self.cards = cards
        self.history = ""

    def seen(self) -> Json:
        """Returns what the player to move sees; of a game that has ended, no card."""
        if self.history in ENDED:
            return {"to_move": None, "card": None, "history": self.history}
        player = to_move(self.history)
        return {"to_move": PLAYERS[player], "card": self.cards[player], "history": self.history}


async def play(arguments: Json, caller: Caller) -> Json:
    """Does the `action` of the player to move, if one is given; returns what is seen then."""
    table: Table = caller.state
    if (action := arguments.get("action")) is not None:
        if action not in ACTIONS or table.history in ENDED:
            raise InputError(f"There is no action {action!r} now.")
        table.history += action[0]
    return table.seen()


def question(seen: Json) -> list[Message]:
    names = {action[0]: action for action in ACTIONS}
    done = " ".join(names[letter] for letter in seen["history"]) or "none"
    text = f"Kuhn poker. Your card: {seen['card']}. Actions so far: {done}. pass or bet?"
    return [{"role": "user", "content": text}]


def action_of(text: str) -> str | None:
    named = _ACTION.findall(text.lower())
    return named[-1] if named else None


def _game_of(output: Any) -> tuple[str | None, bool]:
    if not isinstance(output, dict):
        return None, False
    history, forfeited = output.get("history"), output.get("forfeited") is True
    known = isinstance(history, str) and history in (("", "p", "b", "pb") if forfeited else ENDED)
    return (str(history) if known else None), forfeited
