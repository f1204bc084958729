"""The agents of `gaia` as a sandboxed environment: bench_agents.py, bench_memory.py."""

from envserver_environments.gaia.agents import AgentOptions, solve
from envserver_environments.gaia.interpreter.process import COMPANION

from envserver import Environment, Score, Task


class GaiaZoo(Environment):
    isolation = "sandboxed"
    preload = ()
    companion = COMPANION

    class Config(Environment.Config):
        step_seconds: float = 3.0
        agent: str = "code"
        max_steps: int = 8

    def tasks(self, split):
        yield Task("only", {"question": "How much is it?"}, {"answer": "42"})

    def score(self, task, result):
        return Score(reward=float(result.output["answer"] == task.hidden["answer"]))

    async def rollout(self, task, run):
        rules = AgentOptions(
            agent=self.config.agent,
            step_seconds=self.config.step_seconds,
            max_steps=self.config.max_steps,
        )
        return await solve(task, run, rules)
