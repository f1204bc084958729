"""The environment `my_env`: one agent answers, another one criticises."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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
)

ROWS = Path(__file__).with_name("rows.jsonl")


class MyEnv(Environment):
    """Two agents: a solver, and a critic who is paid for being right about the solver."""

    name = "my_env"
    exact_demonstrations = True  # the simulated engine says nothing before the answer

    def agents(self) -> Mapping[str, AgentRole]:
        """Returns the roles; each may have a model of its own (--env.agents.critic.model_name)."""
        return {"solver": AgentRole(), "critic": AgentRole()}

    def tasks(self, split: Split) -> Iterator[Task]:
        for number, line in enumerate(ROWS.read_text().splitlines()):
            row = json.loads(line)
            yield Task(f"row-{number}", {"question": row["question"]}, {"answer": row["answer"]})

    async def rollout(self, task: PublicTask, run: Rollout) -> dict[str, str]:
        question = task.public["question"]
        messages: list[Message] = [{"role": "user", "content": f"{question} Answer in one word."}]
        answer = (await run.chat(messages, agent="solver")).content
        doubt = f"{question} Somebody says: {answer!r}. Is that right? Answer yes or no."
        reply = await run.chat([{"role": "user", "content": doubt}], agent="critic")
        return {"answer": answer, "verdict": reply.content}

    def score(self, task: Task, result: Result) -> Score:
        right = _word(result, "answer") == task.hidden["answer"].lower()
        verdict = _word(result, "verdict")
        judged = verdict in ("yes", "no") and (verdict == "yes") == right
        # An empty answer that the critic sees through would otherwise pay the critic.
        answered = bool(_word(result, "answer"))
        return Score(rewards={"solver": float(right), "critic": float(judged and answered)})

    def demonstration(self, task: Task) -> Mapping[str, list[Message]]:
        return {
            "solver": [{"role": "assistant", "content": task.hidden["answer"]}],
            "critic": [{"role": "assistant", "content": "yes"}],
        }

    def known_results(self, task: Task) -> Iterator[KnownResult]:
        """Yields results for `envserver check`; the reward is the mean of the agents'."""
        answer = task.hidden["answer"]
        yield _known("both are right", answer, "yes", 1.0)
        yield _known("the critic is wrong", answer, "no", 0.5)
        yield _known("the critic says both", answer, "yes and no", 0.5)
        yield _known("the critic sees the fault", "nothing", "no", 0.5)


def _word(result: Result, name: str) -> str:
    output: dict[str, Any] = result.output if isinstance(result.output, dict) else {}
    return str(output.get(name) or "").strip(" .\n").lower()


def _known(name: str, answer: str, verdict: str, reward: float) -> KnownResult:
    result = Result(output={"answer": answer, "verdict": verdict})
    return KnownResult(name, result, least=reward, most=reward)
