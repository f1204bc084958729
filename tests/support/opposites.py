"""Two agents with rewards of their own; one can learn only after the other has learned."""

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

CALLER, ANSWERER = "caller", "answerer"
WORDS = ("left", "right")


class Opposites(Environment):
    """The caller says a word to the answerer, who is paid for saying the other one. The caller is
    paid if the answerer says what the caller wants to hear: it must say the opposite of that, which
    pays only when the answerer has learned to contradict."""

    def agents(self) -> Mapping[str, AgentRole]:
        return {CALLER: AgentRole(), ANSWERER: AgentRole()}

    def tasks(self, split: Split) -> Iterator[Task]:
        for number in range(1000):
            yield Task(f"{split}-{number}", {"wanted": WORDS[number % 2]})

    async def rollout(self, task: PublicTask, run: Rollout) -> dict[str, Any]:
        called = (await run.chat(question(CALLER, task.public["wanted"]), agent=CALLER)).content
        heard = called if called in WORDS else "nothing"
        answered = (await run.chat(question(ANSWERER, heard), agent=ANSWERER)).content
        return {"called": called, "answered": answered}

    def score(self, task: Task, result: Result) -> Score:
        called, answered = result.output["called"], result.output["answered"]
        known = called in WORDS and answered in WORDS
        rewards = {CALLER: float(known and answered == task.public["wanted"])}
        rewards |= {ANSWERER: float(answered in WORDS and answered != called)}
        return Score(rewards=rewards)

    def demonstration(self, task: Task) -> Mapping[str, list[Message]]:
        wanted = task.public["wanted"]
        return {
            CALLER: [{"role": "assistant", "content": WORDS[1 - WORDS.index(wanted)]}],
            ANSWERER: [{"role": "assistant", "content": wanted}],
        }


def question(agent: str, word: str) -> list[Message]:
    """Returns what an agent is asked: of the word that it wants to hear, or that it hears."""
    told = "You want to hear" if agent == CALLER else "You hear"
    return [{"role": "user", "content": f"{agent}. {told}: {word}. Say left or right."}]
