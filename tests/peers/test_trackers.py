"""`--track` with the real packages, offline: what they wrote is read back by their own; and traces
of a run and of stored rollouts, as a real Phoenix shows them (`make phoenix-peer`).
"""

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.commands import environment_variables, envserver, free_port, read_jsonl, until
from support.foreign_trainers import ROOT, SUPPORT, printed
from support.waiting import PATIENCE

SECRET = "sk-" + "a1b2c3d4" * 4
TRL = ["step", "prompt", "completion", "reward", "advantage"]
OURS = ["components", "environment", "task_id", "group_id", "rollout", "policy_version", "end"]


def alone(folder: Path, *command: object) -> str:
    """Runs a command without anything that the user has set for a tracker; returns its stdout."""
    theirs = ("WANDB_", "TRACKIO_", "MLFLOW_", "HF_")
    environment = {name: one for name, one in os.environ.items() if not name.startswith(theirs)}
    environment |= {"TRACKIO_DIR": str(folder / "trackio"), "HF_HUB_OFFLINE": "1"}
    ours = (str(ROOT / one) for one in (".", "clients", "tools", "environments"))
    environment |= {"HOME": str(folder), "PYTHONPATH": os.pathsep.join(ours)}
    return printed(*command, folder=folder, env=environment, seconds=None)


@pytest.fixture(scope="module")
def written(trackers_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of `process` with all trackers."""
    folder = tmp_path_factory.mktemp("tracked")
    alone(
        folder,
        *(trackers_python, "-m", "envserver", "process", "--env", "math", "--model", "sim"),
        *("--env.total_steps", 12, "--out", "math.jsonl", "--openai.api_key", SECRET),
        *("--track", "jsonl,wandb,trackio,mlflow,tensorboard", "--tracking.folder", "runs"),
        *("--tracking.name", "first", "--tracking.seconds", 0.2),
        *("--tracking.rollouts_minutes", 0, "--tracking.close_seconds", 600),
    )
    return folder


def test_each_tracker_has_settings_scalars_and_table(trackers_python: Path, written: Path) -> None:
    lines = [json.loads(line) for line in (written / "runs/first.jsonl").read_text().splitlines()]
    scalars = [[line["step"], line["reward"]] for line in lines if "reward" in line]
    rows = [row for line in lines for row in line.get("rollouts", ())]
    assert scalars[-1][0] == 12
    assert [*rows[0]] == [*TRL, *OURS, "turns", "link"]
    assert len(rows) >= 4  # of the last four groups at least; how often was written is chance
    shown = alone(
        written, trackers_python, SUPPORT / "trackers_read_back.py", "runs", "envserver", "first"
    )
    found: dict[str, Any] = json.loads(shown.splitlines()[-1])
    assert [*found] == ["wandb", "trackio", "mlflow", "tensorboard"]
    for name, one in found.items():
        assert one["scalars"] == [[step, pytest.approx(value)] for step, value in scalars], name
        assert len(one["rows"]) == len(rows), name
    for name in ("wandb", "trackio", "mlflow"):
        assert found[name]["config"]["environment"] == "math"
        assert found[name]["config"]["openai"]["api_key"] == "**********"
        texts = [[row[column] for column in TRL[:3]] for row in found[name]["rows"]]
        assert texts == [[row[column] for column in TRL[:3]] for row in rows], name
    assert "| environment | math |" in found["tensorboard"]["config"]


def test_no_secret_is_in_any_file(written: Path) -> None:
    files = [one for one in written.rglob("*") if one.is_file()]
    assert len(files) > 10
    assert [one for one in files if SECRET.encode() in one.read_bytes()] == []


# Phoenix


PHOENIX = Path(__file__).parents[2] / ".venv-phoenix" / "bin" / "phoenix"
RUN = (
    *("process", "--env", "tau", "--model", "sim", "--env.total_steps", 1, "--env.group_size", 2),
    *("--sim.solve_probability", 1, "--env.ensure_scores_are_not_same", "false"),
    *("--workers.processes", 1, "--out", "rows.jsonl"),
)


@contextmanager
def phoenix(folder: Path) -> Iterator[str]:
    """A Phoenix with an empty database; yields its address. It is not in `make peers`."""
    if not PHOENIX.exists():
        pytest.skip("Phoenix is missing: run `make phoenix-peer`")
    port = free_port()
    own = {"PHOENIX_PORT": port, "PHOENIX_GRPC_PORT": free_port(), "PHOENIX_HOST": "127.0.0.1"}
    own |= {"PHOENIX_WORKING_DIR": folder, "PHOENIX_TELEMETRY_ENABLED": "false"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [PHOENIX, "serve"],
            cwd=folder,
            env=environment_variables() | {name: str(value) for name, value in own.items()},
            stdout=log,
            stderr=log,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: _answers(url), (folder / "log").read_text, alive=process)
        yield url
    finally:
        process.terminate()
        process.wait(PATIENCE)


def _answers(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/v1/projects", timeout=PATIENCE).is_success
    return False


def spans(url: str, rollout_ids: set[str]) -> list[dict[str, Any]]:
    """Returns the spans of the traces of these rollouts."""
    found = httpx.get(
        f"{url}/v1/projects/default/spans", params={"limit": 1000}, timeout=PATIENCE
    ).json()["data"]
    wanted = [one for one in found if one["attributes"].get("envserver.rollout_id") in rollout_ids]
    of = {one["context"]["trace_id"] for one in wanted}
    return [one for one in found if one["context"]["trace_id"] in of]


def check(found: list[dict[str, Any]], rewards: dict[str, float], turns: int, tools: int) -> None:
    kinds = Counter(one["span_kind"] for one in found)
    assert (kinds["AGENT"], kinds["LLM"], kinds["TOOL"]) == (len(rewards), turns, tools)
    assert ({one["attributes"].get("session.id") for one in found} - {None}) == rewards.keys()
    for one in found:
        told = one["attributes"]
        if one["span_kind"] == "LLM":
            assert told["llm.model_name"] == "sim"
            assert told["llm.input_messages.0.message.role"] == "system"
            assert "shop" in told["llm.input_messages.0.message.content"]
            assert told["llm.output_messages.0.message.role"] == "assistant"
            assert "llm.tools.0.tool.json_schema" in told
        if one["span_kind"] == "TOOL":
            assert one["name"] == f"execute_tool {told['tool.name']}"
            assert told["output.value"]
    scored = [one["attributes"] for one in found if one["name"] == "score"]
    scores = [one["gen_ai.evaluation.score.value"] for one in scored]
    assert sorted(scores) == sorted(rewards.values())


@pytest.mark.peer
def test_phoenix_shows_agents_calls_tools_and_rewards(tmp_path: Path) -> None:
    with phoenix(tmp_path) as url:
        words = ("--telemetry.otlp_endpoint", url, "--telemetry.otlp_texts", "true")
        done = envserver(*RUN, *words, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        (group,) = read_jsonl(tmp_path / "rows.jsonl")
        rollouts = group["envserver"]["rollouts"]
        rewards = {one["rollout_id"]: one["reward"] for one in rollouts}
        turns = sum(one["turns"] for one in rollouts)
        calls = [one for talk in group["messages"] for one in talk if one["role"] == "tool"]
        assert calls

        def shown() -> str:
            return str(Counter(one["name"] for one in spans(url, set(rewards))))

        until(lambda: len(spans(url, set(rewards))) >= turns + len(calls) + 8, shown)
        check(spans(url, set(rewards)), rewards, turns, len(calls))
