"""Where the trainer's batches come from."""

from __future__ import annotations

from itertools import islice
from typing import cast

from envserver_clients.http import SyncEnvClient
from envserver_clients.records import Batch, ClientGroup
from envserver_clients.training.sources import NativeSource


def test_the_trainer_sets_unreadable_groups_aside() -> None:
    class Client:
        leases = [
            Batch("one", 0.0, [unreadable("a"), posted("b")]),
            Batch("two", 0.0, [unreadable("c")]),
            Batch("three", 0.0, [posted("d")]),
        ]

        def __init__(self) -> None:
            self.calls: list[object] = []

        def lease(self, **_: object) -> Batch | None:
            return self.leases.pop(0) if self.leases else None

        def set_aside(self, batch: Batch, group_ids: list[str], *, reason: str) -> None:
            self.calls.append((batch.lease_id, group_ids))

        def ack(self, batch: Batch, **_: object) -> None:
            self.calls.append(batch.lease_id)

    client = Client()
    source = NativeSource(cast(SyncEnvClient, client), idle_seconds=60)
    found = [[group.group_id for group in batch.groups] for batch in islice(source.batches(), 2)]
    assert found == [["b"], ["d"]]
    assert client.calls == [("one", ["a"]), ("two", ["c"]), "two"]


def unreadable(group_id: str) -> ClientGroup:
    return ClientGroup(group_id, "e", "group", -1, memoryview(b"\x00"))


def posted(group_id: str) -> ClientGroup:
    body = b'{"tokens":[[1]],"masks":[[1]],"scores":[1]}'
    return ClientGroup(group_id, "e", "atropos", -1, memoryview(body))
