"""Games of TextArena as environments: each player is an agent, each seed a task.

The game runs in the worker, which executes no code of the model: its text goes to the game's rules,
and an agent is told what the game shows its player, never the state. Rewards are those that the
game gives at its end.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from envserver import (
    AgentRole,
    Environment,
    Message,
    PublicTask,
    Result,
    Rollout,
    Score,
    Split,
    Task,
)

from ..answers import Answer, action_of
from .games import Game, check_game, fewest_players, forfeited, look_for_words_in

_TO_MOVE = "player_to_move"


class TextArena(Environment):
    """A game of TextArena."""

    game: ClassVar[str]
    reward_range = (-1.0, 1.0)
    exact_demonstrations = True
    demonstrations_solve = False

    class Config(Environment.Config):
        max_turns: PositiveInt = 50
        """Maximum model calls of each player; a game that reaches it is a draw."""
        players: PositiveInt | None = None
        """Number of players; unset: the fewest that the game accepts."""
        options: dict[str, Any] = {}
        """Arguments of the game's class, such as {"max_number": 50}."""
        rotate_seats: bool = False
        """Let the agents change seats from task to task; else player0 is always the game's 0."""
        observation: Literal["news", "whole"] = "news"
        """news: each player has one conversation, to which what is new is added. whole: at each
        turn a new conversation with the text of TextArena's wrappers, mostly the whole game."""
        system: str = ""
        """System prompt; {player} is the player's number, {players} how many there are."""
        prompt: str = "{observation}"
        """What a player is asked; as `system`, and {observation} is what the game shows."""
        answer: Answer = "whole"
        """The action in an answer: all of it (after </think>), its last [brackets], its last line,
        or what is in its last <tag>. The game judges what is found, or that nothing is."""
        tag: str = "answer"
        """Name of the tag."""
        unfinished_reward: float = Field(default=0.0, ge=-1, le=1)
        """Reward of every player if the game does not end within the turns."""
        moves: dict[str, list[str]] = {}
        """What the simulated engine says as each player, over and over: {"player0": ["[bet]"]}."""
        nltk_data: str | None = None
        """Folder with the word lists of word games; unset: $NLTK_DATA, or NLTK's usual places."""

        def model_post_init(self, context: Any) -> None:
            # Workers get settings, but not the server's variables.
            self.nltk_data = self.nltk_data or os.environ.get("NLTK_DATA")

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        if self.config.nltk_data:
            look_for_words_in(self.config.nltk_data)

    async def setup(self) -> None:
        # Word games load for seconds; the worker's event loop goes on meanwhile.
        await asyncio.to_thread(self._names)

    def agents(self) -> Mapping[str, AgentRole]:
        names = self._names()
        return dict.fromkeys(names, AgentRole()) if len(names) > 1 else {}

    def tasks(self, split: Split) -> Iterator[Task]:
        rng = random.Random(f"textarena-{self.game}-{self.config.seed}-{split}")
        for number in itertools.count():
            seed = rng.randrange(2**31)
            shift = number if self.config.rotate_seats else 0
            yield Task(f"{split}-{number}", {"seed": seed, "shift": shift})

    async def rollout(self, task: PublicTask, run: Rollout) -> dict[str, Any]:
        config, names = self.config, self._names()
        game = Game(
            self.game,
            config.options,
            players=len(names),
            seed=task.public["seed"],
            whole=config.observation == "whole",
        )
        conversations: dict[int, list[Message]] = {}
        turns: Counter[int] = Counter()
        while not game.ended:
            player, shown = game.turn()
            if turns[player] >= config.max_turns:
                return {"ended": False, "moves": turns.total()}
            turns[player] += 1
            run.log_metric(_TO_MOVE, player)
            if player not in conversations or config.observation == "whole":
                conversations[player] = self._opening(player)
            messages = conversations[player]
            messages.append({"role": "user", "content": self._filled(config.prompt, player, shown)})
            agent = names[self._agent_at(player, task)] if len(names) > 1 else None
            reply = await run.chat(messages, agent=agent)
            messages.append(reply.message)
            action = action_of(reply.content, config.answer, config.tag)
            run.log_action("move", {"player": player, "action": action})
            game.act(action)
        outcome = game.outcome()
        rewards = {str(player): reward for player, reward in outcome.rewards.items()}
        ended = {**outcome._asdict(), "rewards": rewards}
        return {"ended": True, "moves": turns.total(), **ended}

    def score(self, task: Task, result: Result) -> Score:
        names = self._names()
        seats = {name: (n + task.public["shift"]) % len(names) for n, name in enumerate(names)}
        by_player = self._rewards(result, len(names))
        rewards = {name: by_player[seat] for name, seat in seats.items()}
        output = result.output if isinstance(result.output, dict) else {}
        metrics = {
            "moves": float(output.get("moves") or 0),
            "invalid_move": float(bool(output.get("invalid"))),
            "game_error": float(output.get("fallen") is True),
            "unfinished": float(output.get("ended") is not True),
        }
        if len(names) == 1:
            return Score(reward=rewards[names[0]], metrics=metrics)
        return Score(reward=rewards[names[0]], rewards=rewards, metrics=metrics)

    def demonstration(self, task: Task) -> Mapping[str, list[Message]] | list[Message] | None:
        spoken = {
            name: [
                {"role": "assistant", "content": move}
                for move in itertools.islice(itertools.cycle(moves), self.config.max_turns)
            ]
            for name, moves in self.config.moves.items()
        }
        if len(self._names()) == 1:
            return next(iter(spoken.values()), None)
        return spoken or None

    def final_answer(self, result: Result) -> str:
        output = result.output if isinstance(result.output, dict) else {}
        return str(output.get("reason") or "")

    def _rewards(self, result: Result, players: int) -> list[float]:
        """Rewards by player. A player cut off by a limit of tokens, context or time loses, as by an
        invalid move."""
        output = result.output
        if isinstance(output, dict) and output.get("ended") is True:
            rewards = output["rewards"]
            return [float(rewards.get(str(player), 0.0)) for player in range(players)]
        if isinstance(output, dict) and output.get("ended") is False:
            return [self.config.unfinished_reward] * players
        if result.limit is None:
            return [-1.0] * players  # nothing that a rollout returns
        if players == 1 or result.limit == "turns" or _TO_MOVE not in result.metrics:
            return [self.config.unfinished_reward] * players
        rewards = forfeited(int(result.metrics[_TO_MOVE]), players)
        return [rewards[player] for player in range(players)]

    def _names(self) -> list[str]:
        options = json.dumps(self.config.options, sort_keys=True)
        fewest = fewest_players(self.game, options)
        players = self.config.players or fewest
        return [f"player{number}" for number in range(players)]

    def _agent_at(self, player: int, task: PublicTask) -> int:
        return int((player - task.public["shift"]) % len(self._names()))

    def _opening(self, player: int) -> list[Message]:
        if not self.config.system:
            return []
        return [{"role": "system", "content": self._filled(self.config.system, player, "")}]

    def _filled(self, template: str, player: int, shown: str) -> str:
        return (
            template.replace("{players}", str(len(self._names())))
            .replace("{player}", str(player))
            .replace("{observation}", shown)
        )


def textarena_environment(game: str) -> type[Environment]:
    check_game(game)
    name = "textarena_" + re.sub(r"\W+", "_", game.lower())
    about = {"game": game, "name": name, "__doc__": f"{game} of TextArena."}
    return type("TextArena", (TextArena,), {**about, "__module__": __name__})
