"""Two players against each other, with rewards for turns, that a model that babbles can learn."""

from collections.abc import Iterator, Mapping
from typing import Any

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


class Duel(Environment):
    """Each player speaks twice; who says the larger share of lower-case letters gets the difference
    from the other, and in each turn a little for saying one at all."""

    reward_range = (-1.5, 1.5)
    solved_at = 0.5

    def agents(self) -> Mapping[str, AgentRole]:
        return {"one": AgentRole(), "two": AgentRole()}

    def tasks(self, split: Split) -> Iterator[Task]:
        for number in range(40):
            yield Task(f"{split}-{number}", {"question": f"Say {number}."})

    async def rollout(self, task: PublicTask, run: Rollout) -> dict[str, Any]:
        said: dict[str, list[str]] = {"one": [], "two": []}
        for turn in range(2):
            for player, texts in said.items():
                question = f"{task.public['question']} You are {player}, turn {turn}."
                reply = await run.chat([{"role": "user", "content": question}], agent=player)
                texts.append(reply.content)
                run.reward(0.25 * any(map(str.islower, reply.content)), agent=player)
        return {player: "".join(texts) for player, texts in said.items()}

    def score(self, task: Task, result: Result) -> Score:
        one, two = (_letters(result.output[player]) for player in ("one", "two"))
        return Score(rewards={"one": one - two, "two": two - one})

    def demonstration(self, task: Task) -> Mapping[str, list[Message]]:
        said: list[Message] = [{"role": "assistant", "content": "abc"}] * 2
        return {"one": said, "two": said}


def _letters(said: str) -> float:
    return sum(map(str.islower, said)) / max(1, len(said))
