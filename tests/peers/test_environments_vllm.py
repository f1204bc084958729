"""Environments before a real vLLM: each agent's tokens are exactly those that were sampled.

Its random model is held to a form where an answer has to mean something.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from envserver_clients.http import SyncEnvClient
from envserver_environments.gaia.agents import AgentOptions, solve
from support.commands import envserver, free_port, read_jsonl, running, until
from support.relay import relay
from support.sdk_house import SdkHouse, vllm_house
from support.vllm_server import VllmServer
from support.waiting import PATIENCE

from envserver import Group, PublicTask, unpack
from envserver.scaffold import create

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


# gaia


STEPS = 3
CALLS = r'<tool_call>\{"name": "python", "arguments": \{"code": "[1-9] \+ [1-9]"\}\}</tool_call>'
FORMS = {
    "code": r"So: [a-z]{2,5}\n<code>\n[1-9] \+ [1-9]\n</code>",
    "tools": CALLS,
    "plain": CALLS,
}


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
        print(seat.edges, [step["observation"] for step in done["steps"]])
        assert done["state"] == "max_steps"
        assert all(step["observation"].startswith("Value: ") for step in done["steps"])
        edge = "appended" if kind == "code" else "calls"
        assert seat.edges == ["root", edge, edge]
        assert len(seat.sequences) == 1
        seat.assert_exact()


# mhqa


HELD = '''
from envserver_environments.mhqa.env import Mhqa

CALL = r'<tool_call>\\{"name": "%s", "arguments": \\{"%s": "%s"\\}\\}</tool_call>'
SEARCH = CALL % ("search", "query", "[A-Z][a-z]{2,5}")
FINISH = CALL % ("finish", "answer", "(yes|no)")


class Held(Mhqa):
    """Its model searches twice and then says yes or no."""

    async def rollout(self, task, run):
        forms = iter([SEARCH, SEARCH, FINISH])
        chat = run.chat

        def held(messages, **asked):
            return chat(messages, **asked, structured_outputs={"regex": next(forms)})

        run.chat = held
        return await super().rollout(task, run)
'''


def test_a_run_with_tools_is_one_exact_sequence(vllm_server: VllmServer, tmp_path: Path) -> None:
    path = tmp_path / "held.py"
    path.write_text(HELD)
    with relay(vllm_server.root_url) as (url, echoes):
        ran = envserver(
            "process", "--env", path, "--openai.base_url", url, "--tokens.constraints", "all",
            "--tokens.train", "structured_output_masked",
            "--openai.model_name", vllm_server.model, "--sampling.max_tokens", 60,
            "--env.group_size", 2, "--env.total_steps", 3,
            "--env.data_path_to_save_groups", "out.jsonl", folder=tmp_path,
        )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    groups = read_jsonl(tmp_path / "out.jsonl")
    assert len(echoes) == 3 * 2 * 3
    assert [len(group["tokens"]) for group in groups] == [2, 2, 2]
    rows = [
        list(zip(*row, strict=True))
        for group in groups
        for row in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True)
    ]
    # What the engine saw and said at the end of each run is the whole row, and what it sampled in
    # all calls is what is trained.
    seen = [echo.prompt_ids + echo.completion_ids for echo in echoes]
    assert all([token for token, _, _ in row] in seen for row in rows)
    sampled = Counter(
        (token, float(np.float32(logprob)))
        for echo in echoes
        for token, logprob in zip(echo.completion_ids, echo.logprobs, strict=True)
    )
    assert sampled == Counter(
        (token, logprob) for row in rows for token, mask, logprob in row if mask != -100
    )


# The package of `envserver init --kind judge`, with a real vLLM as its judge


TASKS = 2
MARK = r'\{"reason": "[a-z]{2}", "mark": [0-4]\}'
MARKS = rf'\{{"marks": \{{"faithful": {MARK}, "clear": {MARK}\}}\}}'


def judged(server: VllmServer, folder: Path, *, held: bool) -> subprocess.CompletedProcess[str]:
    """Runs the package's first tasks, rightly answered; a real vLLM judges them."""
    (path,) = (one for one in create("my-env", "judge", folder) if one.name == "env.py")
    if held:
        form = "structured_outputs=" + repr({"regex": MARKS})
        code = path.read_text().replace("criteria=CRITERIA", f"criteria=CRITERIA, {form}")
        path.write_text(code)
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


def test_a_judge_that_answers_garbage_gives_no_reward_at_all(
    vllm_server: VllmServer, tmp_path: Path
) -> None:
    ran = judged(vllm_server, tmp_path, held=False)
    assert rollouts(tmp_path) == [], ran.stdout + ran.stderr
    assert ran.returncode == 1 and "judge_error" in ran.stderr
    assert "Unhandled" not in ran.stderr
    failures = read_jsonl(tmp_path / "out.failures.jsonl")
    failed = [one for one in failures if one["event"] == "rollout_failed"]
    assert failed and {(one["kind"], one["blame"]) for one in failed} == {("judge_error", "engine")}
    assert "The judge gave no answer that could be read, 3 times." in failed[0]["message"]


def test_marks_of_a_judge_that_is_held_to_their_form_are_half_of_the_reward(
    vllm_server: VllmServer, tmp_path: Path
) -> None:
    ran = judged(vllm_server, tmp_path, held=True)
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
