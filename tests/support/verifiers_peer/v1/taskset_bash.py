"""A task set whose agent is pinned to the harness that runs the model's programs on the host."""

import verifiers.v1 as vf

__all__ = ["Shells", "ShellEnv"]


class Shells(vf.Taskset[vf.Task[vf.TaskData]]):
    """One task."""

    def load(self):
        yield vf.Task(vf.TaskData(prompt="List the files."), self.config.task)


class ShellConfig(vf.EnvConfig):
    """Its agent."""

    agent: vf.AgentConfig = vf.AgentConfig(harness={"id": "bash"})


class ShellEnv(vf.Env[ShellConfig]):
    """Runs its agent."""

    async def run(self, task, agents):
        await agents.agent.run(task)
