"""Long conversations: what does not fit, and agents that summarise their history."""

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


def test_a_conversation_that_fills_its_row_ends_there_and_is_scored(run: Run) -> None:
    command = (
        f"process --env {echo.__file__}:Talker --model sim --out out.jsonl --env.total_steps 2"
        " --env.max_turns 30 --env.max_token_length 500 --env.group_size 2"
    )
    said = " ".join(run(command).err.split())
    assert "longest 500; ended at a limit: context 4" in said
    for line in read_jsonl(Path("out.jsonl")):
        assert all(300 < len(row) <= 500 for row in line["tokens"])
        assert [one["limit"] for one in line["envserver"]["rollouts"]] == ["context"] * 2
        assert line["scores"] == [1.0, 1.0]
    dropped = run(f"{command} --rollouts.too_long drop_group --out other.jsonl", status=1)
    assert "too_long" in dropped.err
