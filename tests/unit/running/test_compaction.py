"""Rows that follow each other because the agent summarised its history, and their rewards."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from envserver_clients import SyncEnvClient
from envserver_clients.adapters.verl import outputs_of
from envserver_clients.training.advantages import row_advantages
from envserver_records import Group, unpack
from support import echo
from support.commands import read_jsonl
from support.echo import Compacting
from support.in_process import Run
from support.waiting import PATIENCE

import envserver

CHAIN = 1, 2, 4
"""Rows of the main agent; row 0 is of a sub-agent in between, 3 of one beside."""
RULE = "--env.compaction_rewards"
FOLLOWS = [None, None, 1, None, 2]


@pytest.mark.parametrize("rule", ["same", "last", "length"])
def test_rewards_reach_the_rows_of_an_agent_that_compacts(rule: str, run: Run) -> None:
    env: dict[str, Any] = {"group_size": 2, "compaction_rewards": rule}
    settings: dict[str, Any] = {"store": "groups.db", "server": {"port": 0}}
    with (
        envserver.serve(Compacting, model="sim", env=env, **settings) as server,
        SyncEnvClient(server.url, run="trainer", batch_size=1) as client,
    ):
        batch = client.lease(wait_seconds=60)
        assert batch is not None
        client.ack(batch, checkpoint="step-1")
        group_id = batch.groups[0].group_id
        address = f"{server.url}/v1/groups/{group_id}/rollouts/1"
        shown = httpx.get(address, timeout=PATIENCE).json()["rollout"]["sequences"]
        served = server.stop()
    assert served.ending == "stopped"
    shares = [1.0] * 5
    if rule == "last":
        shares[1] = shares[2] = 0.0
    elif rule == "length":
        trained = sum(shown[row]["trained"] for row in CHAIN)
        for row in CHAIN:
            shares[row] = shown[row]["trained"] / trained
    left = [share for share in shares if share]
    assert [row["follows"] for row in shown] == FOLLOWS
    assert [row["share"] for row in shown] == shares

    advantages = zip(batch.rows, row_advantages(batch.rows, "mean"), strict=True)
    learned = [found.value for row, found in advantages if row.trajectory == 1]
    assert learned == pytest.approx([0.5 * share for share in left])
    trajectory = unpack(batch.groups[0].body, Group).trajectories[1]
    outputs = outputs_of(trajectory, "all", prompt_length=9999, response_length=9999)
    assert [output["reward_score"] for output in outputs] == left

    run("export groups.db --to atropos --out out.jsonl")
    lines = {line["envserver"]["group_id"]: line for line in read_jsonl(Path("out.jsonl"))}
    rollout = lines[group_id]["envserver"]["rollouts"][1]
    assert (rollout["follows"], rollout["shares"]) == (FOLLOWS, shares)
    scores, masks = (
        [lines[group_id][name][row] for row in rollout["rows"]] for name in ("scores", "masks")
    )
    assert scores == [share or 1.0 for share in shares]
    assert [{*mask} == {-100} for mask in masks] == [not share for share in shares]
    checked = run(f"check --env {echo.__file__}:Compacting --tasks 1 {RULE} {rule}", status=1).out
    assert f"summarised their history: {RULE} {rule} rewards" in " ".join(checked.split())
    run(f"rescore out.jsonl --env {echo.__file__}:Compacting --out again.jsonl --processes 1")
    assert [line["scores"] for line in read_jsonl(Path("again.jsonl"))] == [
        line["scores"] for line in lines.values()
    ]
