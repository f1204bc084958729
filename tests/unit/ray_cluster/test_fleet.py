"""How many runners there are, and what becomes of them; Ray is tried in tests/peers/test_ray.py."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from support.clocks import Clock

from envserver.ray_cluster import cluster as fleets
from envserver.ray_cluster.cluster import Actor, CommandSpec, Fleet, Load, RunnerFailed, Scaling
from envserver.running.ray_runners import divided
from envserver.settings.runs import RayConfig


class StandIn(Actor):
    def __init__(self, spec: CommandSpec) -> None:
        super().__init__(None)
        self.number = int(spec.argv[0])
        self.state = {"host": "node", "status": None}


class Cluster:
    """A cluster that has room for everything."""

    def __init__(self) -> None:
        self.actors: list[StandIn] = []

    async def start(self, spec: CommandSpec) -> StandIn:
        self.actors.append(StandIn(spec))
        return self.actors[-1]

    async def look(self, actors: Sequence[StandIn]) -> None:
        pass

    async def stop(self, actors: Iterable[StandIn], seconds: float) -> None:
        for one in actors:
            self.actors.remove(one)


def fleet(cluster: Any) -> tuple[Fleet, list[int]]:
    drained: list[int] = []
    made = Fleet(
        cluster,
        "math",
        RayConfig(),
        make=lambda number: CommandSpec((str(number),), "{}"),
        drain=drained.append,
    )
    return made, drained


async def test_there_are_as_many_runners_as_are_wanted() -> None:
    cluster = Cluster()
    runners, drained = fleet(cluster)
    await runners.tick(3)
    assert [one.number for one in cluster.actors] == [0, 1, 2]
    await runners.tick(1)
    assert drained == [1, 2] and runners.size == 1 and len(cluster.actors) == 3
    for one in cluster.actors[1:]:
        one.state["status"] = 0  # they have finished what was open
    await runners.tick(1)
    assert [one.number for one in cluster.actors] == [0]


async def test_a_runner_that_cannot_start_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(fleets, "time", clock)
    cluster = Cluster()
    runners, _ = fleet(cluster)
    for _ in range(2):
        await runners.tick(1)
        cluster.actors[0].state |= {"status": 2, "said": "No module named 'mine'"}
        await runners.tick(1)
        assert not cluster.actors  # not again at once
        clock.ahead += 60
    await runners.tick(1)
    cluster.actors[0].state |= {"status": 2, "said": "No module named 'mine'"}
    with pytest.raises(RunnerFailed, match="No module named 'mine'"):
        await runners.tick(1)


def test_up_at_once_down_after_a_while_and_not_up_for_a_full_engine() -> None:
    clock = Clock()
    scaling = Scaling(RayConfig(min=1, max=8, idle_seconds=60), clock.monotonic)
    assert scaling.wanted(Load(30, 10), room=99) == 3
    assert scaling.wanted(Load(999, 10, engine_waits=True), room=99) == 3
    assert scaling.wanted(Load(999, 10), room=99) == 8
    assert scaling.wanted(Load(10, 10), room=99) == 8
    clock.ahead += 59
    assert scaling.wanted(Load(45, 10), room=99) == 8
    clock.ahead += 2
    assert scaling.wanted(Load(10, 10), room=99) == 5  # the most of the last minute
    assert Scaling(RayConfig()).wanted(Load(999, 10), room=2) == 2
    assert Scaling(RayConfig(runners=4)).wanted(Load(0, 10), room=1) == 4


@pytest.mark.parametrize(
    ("total", "weights", "shares"),
    [(4, [1], [4]), (8, [3, 1], [6, 2]), (1, [1, 1], [1, 1]), (5, [1, 1], [3, 2])],
)
def test_runners_are_divided_by_weight(total: int, weights: list[float], shares: list[int]) -> None:
    assert divided(total, weights) == shares
