"""Environments before a real vLLM: each agent's tokens are exactly those that were sampled.

Its random model is held to a form where an answer has to mean something.
"""

import asyncio
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from envserver_clients.http import SyncEnvClient
from envserver_environments.gaia.agents import AgentOptions, solve
from envserver_factory.scaffold import create
from support.commands import envserver, free_port, read_jsonl, running, until
from support.sdk_house import SdkHouse, vllm_house
from support.vllm_server import VllmServer
from support.waiting import PATIENCE

from envserver import Group, PublicTask, unpack

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


def test_a_trainer_gets_of_each_what_was_sampled(vllm_server: VllmServer, tmp_path: Path) -> None:
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


# gaia


STEPS = 3
CALLS = r'<tool_call>\{"name": "python", "arguments": \{"code": "[1-9] \+ [1-9]"\}\}</tool_call>'
FORMS = {"code": r"So: [a-z]{2,5}\n<code>\n[1-9] \+ [1-9]\n</code>", "tools": CALLS, "plain": CALLS}


@pytest.fixture(scope="module")
def house(vllm_server: VllmServer) -> Iterator[SdkHouse]:
    with vllm_house(vllm_server.base_url, vllm_server.model) as house:
        yield house


@pytest.mark.parametrize("kind", FORMS)
def test_an_ordinary_run_is_one_sequence(
    house: SdkHouse, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    extra: dict[str, Any] = {"structured_outputs": {"regex": FORMS[kind]}, "seed": 5}
    task = PublicTask("one", {"question": "How much is it?"})
    with house.seat() as seat:
        run: Any = SimpleNamespace(
            base_url=f"{seat.url}/v1",
            api_key=seat.attempt.key,
            model=seat.model,
            deadline=time.time() + 900,
            log_action=lambda *step, **more: None,
        )
        rules = AgentOptions(agent=kind, max_steps=STEPS)  # type: ignore[arg-type]
        done = asyncio.run(solve(task, run, rules, extra=extra))
        assert done["state"] == "max_steps"
        assert all(step["observation"].startswith("Value: ") for step in done["steps"])
        edge = "appended" if kind == "code" else "calls"
        assert seat.edges == ["root", edge, edge]
        assert len(seat.sequences) == 1
        seat.assert_exact()


# The package of `envserver init --kind judge`, with a real vLLM as its judge


TASKS = 2
MARK = r'\{"reason": "[a-z]{2}", "mark": [0-4]\}'
MARKS = rf'\{{"marks": \{{"faithful": {MARK}, "clear": {MARK}\}}\}}'


def judged(server: VllmServer, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the package's first tasks, rightly answered; a real vLLM judges them."""
    (path,) = (one for one in create("my-env", "judge", folder) if one.name == "env.py")
    form = "structured_outputs=" + repr({"regex": MARKS})
    path.write_text(path.read_text().replace("criteria=CRITERIA", f"criteria=CRITERIA, {form}"))
    return envserver(
        *("process", "--env", path, "--env.judged", "true", "--env.total_steps", TASKS),
        *("--env.group_size", 2, "--env.ensure_scores_are_not_same", "false"),
        *("--model", "sim", "--sim.solve_probability", 1, "--rollouts.max_attempts", 1),
        *("--judge.base_url", server.base_url, "--judge.max_tokens", 100),
        *("--out", "out.jsonl"),
        folder=folder,
    )


def rollouts(folder: Path) -> list[dict[str, Any]]:
    path = folder / "out.jsonl"
    groups = read_jsonl(path) if path.exists() else []
    return [one for group in groups for one in group["envserver"]["rollouts"]]


def test_marks_of_a_judge_that_is_held_to_their_form_are_half_of_the_reward(
    vllm_server: VllmServer, tmp_path: Path
) -> None:
    ran = judged(vllm_server, tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = rollouts(tmp_path)
    assert len(found) == TASKS * 2
    for one in found:
        parts = one["components"]
        assert parts["rule"] == 1.0 and {parts["faithful"], parts["clear"]} <= {
            0,
            0.25,
            0.5,
            0.75,
            1,
        }
        assert one["reward"] == 0.5 + 0.25 * (parts["faithful"] + parts["clear"])
