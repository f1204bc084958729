"""Long conversations: what does not fit, and agents that summarise their history."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from envserver_clients import SyncEnvClient
from envserver_clients.adapters.completions import completions_of, main_completion
from envserver_clients.training.advantages import row_advantages
from envserver_records import InputError, Sequence
from support import echo
from support.commands import read_jsonl
from support.echo import Compacting
from support.in_process import Run
from support.waiting import PATIENCE

import envserver
from envserver.export.stored import group_of, group_record

FOLLOWS = [None, None, 1, None, 2]
"""Rows 1, 2, 4 are of the main agent; row 0 is of a sub-agent in between, 3 of one beside."""


def shares_of(rule: str, rows: list[Sequence]) -> list[float]:
    if rule == "length":
        trained = [int(row.mask.sum()) for row in rows]
        chain = trained[1] + trained[2] + trained[4]
        return [1, trained[1] / chain, trained[2] / chain, 1, trained[4] / chain]
    return [1, 0, 0, 1, 1] if rule == "last" else [1] * 5


@pytest.mark.parametrize("rule", ["same", "last", "length"])
def test_rows_name_the_one_that_they_follow_and_share_its_reward(rule: str, run: Run) -> None:
    env = {"group_size": 2, "compaction_rewards": rule}
    settings: dict[str, Any] = {"store": "groups.db", "server": {"port": 0}}
    with (
        envserver.serve(Compacting, model="sim", env=env, **settings) as server,
        SyncEnvClient(server.url, run="trainer", batch_size=1) as client,
    ):
        batch = client.lease(wait_seconds=60)
        assert batch is not None
        client.ack(batch, checkpoint="step-1")
        address = f"{server.url}/v1/groups/{batch.groups[0].group_id}/rollouts/1"
        shown = httpx.get(address, timeout=PATIENCE).json()["rollout"]["sequences"]
        served = server.stop()
    assert served.ending == "stopped"
    run("export groups.db --to atropos --out out.jsonl")
    line = read_jsonl(Path("out.jsonl"))[0]
    trajectory = group_record(group_of(line, "line 1")).trajectories[1]
    rows, shares = trajectory.sequences, shares_of(rule, trajectory.sequences)
    assert [row.follows for row in rows] == [row["follows"] for row in shown] == FOLLOWS
    assert [row.share for row in rows] == [row["share"] for row in shown] == shares

    group = batch.groups[0]
    assert group.format == ("group" if rule == "same" else "group-shares")
    leased = [row for row in group.rows if row.trajectory == 1]
    assert [row.share for row in leased] == [share for share in shares if share]
    better = [row_advantage.value for row_advantage in row_advantages(group.rows)]
    assert better[-len(leased) :] == pytest.approx([share for share in shares if share], rel=1e-3)

    not_trained = [bool(override) for override in (line["overrides"] or [{}] * 10)]
    assert not_trained == [share == 0 for share in shares] * 2
    if rule != "same":
        sums = [sum(row) for row in line["advantages"][5:]]
        parts = [share * row.mask.sum() for row, share in zip(rows, shares, strict=True)]
        assert sums == pytest.approx(parts, rel=1e-3)
    if rule == "length":
        with pytest.raises(InputError, match="compaction_rewards"):
            main_completion(trajectory)
    else:
        assert main_completion(trajectory).completion_ids[-1] == rows[4].tokens[-1]
        assert len(completions_of(trajectory)) == sum(map(bool, shares))


def test_check_says_that_an_agent_summarises_its_history(run: Run) -> None:
    command = f"check --env {echo.__file__}:Compacting --tasks 1 --env.compaction_rewards last"
    checked = " ".join(run(command, status=1).out.split())
    assert "summarised their history: --env.compaction_rewards last" in checked


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
