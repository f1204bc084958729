"""Environments in one `serve` before a real vLLM: each agent's tokens reach a trainer exactly."""

from __future__ import annotations

import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from envserver_clients.http import SyncEnvClient
from support.commands import free_port, running, until
from support.vllm_server import VllmServer
from support.waiting import PATIENCE

from envserver import Group, unpack

pytestmark = pytest.mark.vllm

ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "tau": {"user": "model", "max_turns": 3},
    "mhqa": {"max_turns": 3},
    "video": {"mode": "report", "max_turns": 2},
    "router": {"max_turns": 2},
    "code": {"mode": "single"},
}
AGENTS = {"tau": {"agent"}, "video": {"captions", "organizer"}, "router": {"router"}}
"""Of those with several: who speaks in every rollout, or almost, and is trained."""


def test_what_a_trainer_gets_of_each_is_what_was_sampled(
    vllm_server: VllmServer, tmp_path: Path
) -> None:
    """Its model is random. The engine is asked again for the logprobs of every row."""
    settings = {
        "environments": [
            {"name": name, "env": {**env, "total_steps": 1}} for name, env in ENVIRONMENTS.items()
        ],
        "env": {"group_size": 2, "ensure_scores_are_not_same": False},
        "openai": {"base_url": f"{vllm_server.root_url}/v1"},
        "sampling": {"max_tokens": 48},
        "tokens": {"audit_fraction": 1},
        "rollouts": {"max_concurrent": 4},
        "store": "groups.db",
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    port, groups = free_port(), len(ENVIRONMENTS)
    agents: dict[str, set[str | None]] = defaultdict(set)
    with running("serve", "--config", "run.yaml", "--port", port, folder=tmp_path) as server:
        server.wait_for("Trainers: ")
        with SyncEnvClient(f"http://127.0.0.1:{port}", run="all", batch_size=1) as client:
            for left in reversed(range(groups)):
                batch = next(client.batches(idle_seconds=PATIENCE))
                for group in batch.groups:
                    assert group.rows
                    for trajectory in unpack(group.body, Group).trajectories:
                        trained = [row for row in trajectory.sequences if row.mask.any()]
                        assert trained == trajectory.sequences
                        agents[group.env] |= {row.agent for row in trained}
                if left:
                    client.ack(batch)  # with the last one the server ends

            def audited() -> Any:
                report = client.status()["server"]["audit"]
                return report if report["rollouts_waiting"] == 0 else None

            report = until(audited, server.output, alive=server.process)
        assert report["rows"] > 0
        assert report["rows_over_tolerance"] == 0, report
        server.send(signal.SIGTERM)
        assert server.end() == 0
    assert set(agents) == set(ENVIRONMENTS)
    for name, names in AGENTS.items():
        assert names <= agents[name], agents
