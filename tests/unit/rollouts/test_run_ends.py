"""How a run ends whose groups fail."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from envserver_records.errors import TooMuchUntrained
from envserver_records.records import Task
from support.api import native_group
from support.waiting import settled

from envserver import Group, RolloutsConfig
from envserver.rollouts.events import Event, GroupDropped
from envserver.rollouts.policy import Drop
from envserver.rollouts.scheduler import Scheduler
from envserver.rollouts.stream import GroupRequest
from envserver.rollouts.untrained import UntrainedCeiling


class Maker:
    """Makes the first group, and drops the second while the first is being stored."""

    environment: Any = SimpleNamespace(config=SimpleNamespace(group_size=1))
    rollouts = RolloutsConfig(max_concurrent=2)
    ceiling = UntrainedCeiling(0.1, 1)

    def __init__(self) -> None:
        self.storing, self.dropped = asyncio.Event(), asyncio.Event()

    def observer(self, event: Event) -> None:
        if isinstance(event, GroupDropped):
            self.dropped.set()

    async def make(self, request: GroupRequest) -> Group | Drop:
        if request.index == 0:
            return native_group(request.group_id)
        await self.storing.wait()
        return Drop("untrained", "too much", True)


class Sink:
    def __init__(self, maker: Maker) -> None:
        self.maker = maker
        self.stored: list[str] = []

    async def put(self, group: Group) -> None:
        self.maker.storing.set()
        await self.maker.dropped.wait()
        await settled()
        self.stored.append(group.group_id)

    async def known(self, group_ids: list[str]) -> set[str]:
        return set()

    async def wait_for_capacity(self) -> None:
        return


async def test_a_run_that_ends_by_one_group_stores_those_that_are_made() -> None:
    maker = Maker()
    sink = Sink(maker)
    requests = (
        GroupRequest(
            group_id=f"g{number}", index=number, env="math", split="train", seed=0,
            task=Task(f"t{number}", {}),
        )
        for number in range(9)
    )  # fmt: skip
    scheduler = Scheduler(maker, requests, sink, wanted=None, stop_on_failures=True)
    with pytest.raises(TooMuchUntrained):
        await scheduler.run()
    assert (sink.stored, scheduler.delivered) == (["g0"], 1)
