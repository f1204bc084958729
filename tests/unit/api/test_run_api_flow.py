"""`run-api` applies the declared staleness rules, as `serve` does."""

from __future__ import annotations

from pathlib import Path

import httpx
from envserver_clients.http import SyncEnvClient
from envserver_records.records import pack
from support.commands import free_port, running, until
from support.joined import GROUP, registration, stream_group
from support.waiting import PATIENCE


def test_groups_that_are_too_old_are_dropped_and_counted(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    words = ("--rollouts.max_staleness_at_delivery", 1, "--rollouts.max_queued_groups", 5)
    with (
        running("run-api", "--port", port, "--store", "g.db", *words, folder=tmp_path) as server,
        httpx.Client(base_url=url, timeout=PATIENCE) as http,
    ):
        server.wait_for("Trainers and environments")
        welcome = http.post("/v1/environments", json=registration()).json()
        place, key = f"/v1/environments/{welcome['id']}", {"x-environment-key": welcome["key"]}

        def beat(open_groups: int) -> int:
            said = {"capacity": 99, "open": open_groups}
            answer = http.post(f"{place}/heartbeat", json=said, headers=key)
            return int(answer.json()["room"])

        assert beat(0) == 5
        with SyncEnvClient(url, run="trainer", batch_size=1) as client:
            client.publish_policy_version(8)
            for index in range(2):  # sampled by version 7
                body = pack(stream_group(index))
                sent = http.post(f"{place}/groups", content=body, headers=key | GROUP)
                assert sent.status_code == 200, sent.text
            batch = next(client.batches(idle_seconds=PATIENCE))
            client.ack(batch)
            client.publish_policy_version(9)
            assert client.lease() is None

            def counted() -> bool:
                status = client.status()
                return status["server"]["stale_groups"] == 1 == status["groups"]["dropped"]

            until(counted, server.output, alive=server.process)
            assert beat(0) == 2  # no more than are still fresh when they are delivered
