"""An environment that even a model that babbles can learn: to answer in letters, twice."""

from collections.abc import Iterator
from typing import Any

from envserver import Environment, PublicTask, Result, Rollout, Score, Split, Task


class Letters(Environment):
    """Say something, twice; the reward is the share of lower-case letters in it."""

    def tasks(self, split: Split) -> Iterator[Task]:
        for number in range(40):
            yield Task(f"{split}-{number}", {"question": f"Say {number}."})

    async def rollout(self, task: PublicTask, run: Rollout) -> dict[str, Any]:
        messages = [{"role": "user", "content": task.public["question"]}]
        said = []
        for _ in range(2):
            reply = await run.chat(messages)
            said.append(reply.content)
            messages += [reply.message, {"role": "user", "content": "Again."}]
        return {"said": said}

    def score(self, task: Task, result: Result) -> Score:
        said = "".join(result.output["said"])
        return Score(reward=sum(character.islower() for character in said) / max(1, len(said)))
