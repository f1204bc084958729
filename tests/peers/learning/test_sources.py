"""Where the trainer's batches come from."""

from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from envserver_clients.adapters.atropos import AtroposTrainerClient
from envserver_clients.records import Batch, ClientGroup
from envserver_clients.training.advantages import AdvantageSettings
from envserver_clients.training.checkpoints import CheckpointInfo
from envserver_clients.training.guard import GuardSettings, NothingLearned
from envserver_clients.training.settings import TrainerSettings, from_flags
from envserver_clients.training.sources import AtroposSource, NativeSource, open_source
from support.commands import free_port, running


def test_the_trainer_sets_unreadable_groups_aside() -> None:
    calls: list[object] = []
    leases = [
        Batch("one", 0.0, [unreadable("a"), posted("b")]),
        Batch("two", 0.0, [unreadable("c")]),
        Batch("three", 0.0, [posted("d")]),
    ]
    client: Any = SimpleNamespace(
        lease=lambda **_: leases.pop(0) if leases else None,
        set_aside=lambda batch, group_ids, reason: calls.append((batch.lease_id, group_ids)),
        ack=lambda batch, **_: calls.append(batch.lease_id),
    )
    source = NativeSource(client, idle_seconds=60)
    found = [[group.group_id for group in batch.groups] for batch in islice(source.batches(), 2)]
    assert found == [["b"], ["d"]]
    assert calls == [("one", ["a"]), ("two", ["c"]), "two"]


def test_a_trainer_whose_groups_are_all_replaced_ends() -> None:
    body = b'{"tokens":[[1,2],[1,3]],"masks":[[-100,2],[-100,3]],"scores":[0,0]}'
    equal = ClientGroup("e", "e", "atropos", -1, memoryview(body))
    client: Any = SimpleNamespace(
        lease=lambda **_: Batch("one", 0.0, [equal]),
        set_aside=lambda *_, **__: None,
        nack=lambda *_, **__: None,
    )
    source = NativeSource(client, idle_seconds=60, sampling=AdvantageSettings())
    with pytest.raises(NothingLearned, match="--waste-patience"):
        next(source.batches())


@pytest.mark.parametrize("wire", [NativeSource, AtroposSource])
def test_a_trainer_whose_server_drops_all_groups_ends(
    wire: type[NativeSource | AtroposSource],
) -> None:
    status: dict[str, Any] = {"groups_dropped": {"incomplete": 0}, "latest_failure": "No Score."}

    def lease(**_: object) -> None:
        status["groups_dropped"] = {"incomplete": status["groups_dropped"]["incomplete"] + 5}

    client: Any = SimpleNamespace(lease=lease, status=lambda: {"server": status})
    guard = GuardSettings(waste_patience=2)
    source = wire(client, idle_seconds=60, groups=10, guard=guard)
    with pytest.raises(NothingLearned, match=r"\(10 incomplete; .*No Score.* 2 batches in a row"):
        next(source.batches())
    assert status["groups_dropped"] == {"incomplete": 25}


def test_an_atropos_server_without_a_status_says_nothing_of_dropped_groups() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        known = request.url.path == "/register"
        return httpx.Response(200 if known else 404, json={"detail": "Not Found"})

    transport = httpx.MockTransport(answer)
    with AtroposTrainerClient("http://127.0.0.1:1", group_size=2, transport=transport) as client:
        assert client.status() == {}


def unreadable(group_id: str) -> ClientGroup:
    return ClientGroup(group_id, "e", "group", -1, memoryview(b"\x00"))


def posted(group_id: str) -> ClientGroup:
    body = b'{"tokens":[[1]],"masks":[[1]],"scores":[1]}'
    return ClientGroup(group_id, "e", "atropos", -1, memoryview(body))


@pytest.mark.parametrize("dynamic", [True, False])
def test_groups_that_teach_nothing_are_replaced_in_a_batch(tmp_path: Path, dynamic: bool) -> None:
    """A real server: the batch is full, and only this run's queue loses the others."""
    rewards = {"a": (0, 1), "b": (1, 1), "c": (0, 0), "d": (1, 0), "e": (0, 1)}
    with running("run-api", "--port", free_port(), folder=tmp_path) as api, ExitStack() as stack:
        url = api.wait_for(r"http://127\.0\.0\.1:\d+")[0]
        flags = ["--model", "m", "--output", "o", "--server", url, "--groups", "2"]
        flags += ["--dynamic-sampling"] if dynamic else []
        source, _ = open_source(from_flags(TrainerSettings, flags, program="grpo"), stack)
        source.resume(CheckpointInfo(step=0, version=0))
        for scores in rewards.values():
            body = {"tokens": [[1, 2]] * 2, "masks": [[-100, 2]] * 2, "scores": scores}
            httpx.post(f"{url}/scored_data", json=body).raise_for_status()
        batch = next(source.batches())
        taught = [tuple(row.reward for row in group.rows) for group in batch.groups]
        assert taught == ([(0, 1), (1, 0)] if dynamic else [(0, 1), (1, 1)])
        source.done(batch, None)
