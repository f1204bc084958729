"""Rows that follow each other because the agent summarised its history."""

from pathlib import Path
from typing import Any

import httpx
from envserver_clients import SyncEnvClient
from support import echo
from support.commands import read_jsonl
from support.echo import Compacting
from support.in_process import Run
from support.waiting import PATIENCE

import envserver
from envserver.export.stored import group_of, group_record

FOLLOWS = [None, None, 1, None, 2]
"""Rows 1, 2, 4 are of the main agent; row 0 is of a sub-agent in between, 3 of one beside."""


def test_rows_name_the_one_that_they_follow(run: Run) -> None:
    settings: dict[str, Any] = {"store": "groups.db", "server": {"port": 0}}
    with (
        envserver.serve(Compacting, model="sim", env={"group_size": 2}, **settings) as server,
        SyncEnvClient(server.url, run="trainer", batch_size=1) as client,
    ):
        batch = client.lease(wait_seconds=60)
        assert batch is not None
        client.ack(batch, checkpoint="step-1")
        address = f"{server.url}/v1/groups/{batch.groups[0].group_id}/rollouts/1"
        shown = httpx.get(address, timeout=PATIENCE).json()["rollout"]["sequences"]
        served = server.stop()
    assert served.ending == "stopped"
    assert [row["follows"] for row in shown] == FOLLOWS
    run("export groups.db --to atropos --out out.jsonl")
    line = read_jsonl(Path("out.jsonl"))[0]
    assert line["envserver"]["rollouts"][1]["follows"] == FOLLOWS
    rows = group_record(group_of(line, "line 1")).trajectories[1].sequences
    assert [row.follows for row in rows] == FOLLOWS
    checked = run(f"check --env {echo.__file__}:Compacting --tasks 1", status=1).out
    assert "rollouts summarised their history" in " ".join(checked.split())
