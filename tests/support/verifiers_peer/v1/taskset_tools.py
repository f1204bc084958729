"""A task set with tools of its own: a server that verifiers starts for each rollout."""

import verifiers.v1 as vf

__all__ = ["Prices"]


class PriceTools(vf.Toolset[vf.ToolsetConfig]):
    """Knows prices."""

    @vf.tool
    async def price(self, item: str) -> int:
        """Returns the price of an item."""
        return {"apple": 3}[item]


class PriceData(vf.TaskData):
    """A question about a price."""

    answer: str


class PriceTask(vf.Task[PriceData]):
    """Is paid for the price."""

    @classmethod
    def toolsets(cls, config):
        return [PriceTools(vf.ToolsetConfig())]

    @vf.reward
    async def exact(self, trace):
        return float(trace.last_reply == self.data.answer and len(trace.tool_messages) == 1)


class Prices(vf.Taskset[PriceTask]):
    """One question."""

    def load(self):
        yield PriceTask(PriceData(prompt="What does an apple cost?", answer="3"), self.config.task)


if __name__ == "__main__":
    PriceTools.run()
