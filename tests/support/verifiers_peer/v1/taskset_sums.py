"""A task set for one agent: sums, without end, a reward and a metric."""

import itertools

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    """A sum."""

    answer: str


class SumTask(vf.Task[SumData]):
    """Is paid for the answer alone."""

    @vf.reward(weight=0.5)
    async def exact(self, trace):
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def words(self, trace):
        return float(len(trace.last_reply.split()))


class SumsConfig(vf.TasksetConfig):
    """Its settings."""

    first: int = 0


class Sums(vf.Taskset[SumTask, SumsConfig]):
    """Add a number to itself."""

    INFINITE = True

    def load(self):
        for n in itertools.count(self.config.first):
            data = SumData(prompt=f"What is {n} + {n}?", answer=str(2 * n))
            yield SumTask(data, self.config.task)
