"""What `/metrics` tells of delivered and dropped groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from envserver_records.records import Group, Score
from support.api import native_group, put_native
from support.trajectories import sequence, trajectory

from envserver.rollouts.events import GroupDelivered, GroupDropped
from envserver.running.metrics import Deliveries, RolloutNumbers
from envserver.store import open_store
from envserver.telemetry.history import Name, numbers_of


async def test_spread_and_equal_groups_are_counted_delivered_or_not() -> None:
    numbers = RolloutNumbers()
    observe = numbers.observer("math")
    for number, rewards in enumerate([(0.0, 1.0), (0.5, 0.5)]):
        rows = [sequence([1, 2], [0, 1])]
        played = [trajectory(str(n), *rows, score=Score(reward=r)) for n, r in enumerate(rewards)]
        group = Group(
            group_id=f"g{number}", index=number, env="math", task_id="t", split="train",
            trajectories=played,
        )  # fmt: skip
        observe(GroupDelivered(group=group))
    dropped: dict[str, Any] = {"index": 2, "task_id": "t", "failed": False, "message": ""}
    dropped["at"] = 0.0
    observe(GroupDropped(group_id="g2", reason="zero_variance", **dropped))
    observe(GroupDropped(group_id="g3", reason="stale", **dropped))
    now = numbers_of(await numbers.families())
    of = (("environment", "math"),)
    assert now[Name("envserver_group_deviation_count", of)] == 2
    assert now[Name("envserver_group_deviation_sum", of)] == 0.5
    assert now[Name("envserver_groups_equal_total", of)] == 2


async def test_groups_of_others_are_counted_when_they_are_stored_once(tmp_path: Path) -> None:
    async with open_store(tmp_path / "groups.db") as store:
        for group_id in ("g1", "g2", "g1"):  # the third was stored before
            await put_native(store, native_group(group_id, score=Score(reward=0.25)))
        now = numbers_of(await Deliveries(store, lambda: -1).families())
    of = (("environment", "math"),)
    assert now[Name("envserver_stored_groups_total", of)] == 2
    assert now[Name("envserver_stored_equal_groups_total", of)] == 2
    assert now[Name("envserver_stored_reward_count", of)] == 4
    assert now[Name("envserver_stored_reward_sum", of)] == 1.0
