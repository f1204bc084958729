"""A task set for two players and a judge: who names the higher number wins a point of the other."""

import re

import verifiers.v1 as vf

__all__ = ["Duel", "DuelEnv"]


class DuelData(vf.TaskData):
    """A round, and what a player may say."""

    answer: str = "7"


class DuelTask(vf.Task[DuelData]):
    """Has no reward of its own: the environment compares."""


class Duel(vf.Taskset[DuelTask]):
    """Four rounds."""

    def load(self):
        for number in range(4):
            yield DuelTask(DuelData(prompt=f"Round {number}. Name a number."), self.config.task)


class DuelConfig(vf.EnvConfig):
    """The players, and who greets them."""

    player0: vf.AgentConfig = vf.AgentConfig(max_turns=1)  # is not asked twice
    player1: vf.AgentConfig = vf.AgentConfig()
    host: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})


def number_of(trace):
    """The last number that a player names; -1 without one."""
    return int((re.findall(r"\d+", trace.last_reply) or ["-1"])[-1])


class DuelEnv(vf.Env[DuelConfig]):
    """Two players name a number each, after the host has opened the round."""

    async def setup(self, agents):
        agents.host.trainable = False

    async def run(self, task, agents):
        await agents.host.run(task.with_data(prompt="Open the round."))
        async with agents.player0.interaction(task.with_data(prompt=None)) as first:
            said = await first.turn(task.data.prompt)
            if not said.terminated:
                await first.turn("Are you sure? Name it again.")
        await agents.player1.run(task)

    async def finalize(self, task, episode):
        traces = {trace.agent.name: trace for trace in episode.traces}
        ahead = number_of(traces["player0"]) - number_of(traces["player1"])
        points = float((ahead > 0) - (ahead < 0))
        traces["player0"].record_reward("points", points)
        traces["player1"].record_reward("points", -points)
        traces["player0"].record_metric("ahead", ahead)
