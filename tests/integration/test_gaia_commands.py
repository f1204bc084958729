"""`gaia` from the command line, as its earlier users typed it, and as trainers get it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import free_port, read_jsonl, running, served, typed
from support.vllm_server import VllmServer
from support.waiting import PATIENCE

from envserver.models import ASSETS

PYTHON = Path(sys.executable)
TRAINER = Path(__file__).parents[1] / "support" / "atropos_peer" / "trainer.py"
AS_BEFORE = (
    "--env.group_size 2 --env.include_messages true --env.max_concurrent_processes 8"
    " --env.use_chat_completion true"
)
"""Flags of the seed's commands."""
SOLVED = "--model sim --sim.latency_seconds 0"
EVEN = "--env.ensure_scores_are_not_same false"


@pytest.fixture(autouse=True)
def _smolagents() -> None:
    pytest.importorskip("smolagents", reason="smolagents (extra gaia) is not installed")


@pytest.mark.thorough
def test_process_as_it_was_typed(tmp_path: Path) -> None:
    """With smolagents' CodeAgent, on an engine that knows nothing of us."""
    with running("models", "sim", "--port", 0, folder=tmp_path) as engine:
        url = engine.wait_for(r"http://\S+/v1")[0]
        line = (
            f"process --env.data_path_to_save_groups out.jsonl --env.total_steps 1 {AS_BEFORE}"
            f" --openai.model_name sim --openai.base_url {url}"
        )
        words = ("-m", "environments.gaia", *line.split())
        with running(*words, folder=tmp_path, program=PYTHON) as process:
            assert process.end() == 0, process.output()
    (group,) = read_jsonl(tmp_path / "out.jsonl")
    assert len(group["envserver"]["rollouts"]) == 2
    assert all(messages[0]["role"] == "system" for messages in group["messages"])


@pytest.mark.thorough
def test_sft_rows_of_conversations_and_of_tokens(tmp_path: Path) -> None:
    save = "--save-messages --num-seqs-to-save 5 --group-size 3 --save-top-n-per-group 2"
    agent = "--tokenizer no/such --env gaia --env.agent plain"
    typed(f"sft-gen talks.jsonl {agent} {save} {SOLVED}", tmp_path)
    rows = read_jsonl(tmp_path / "talks.jsonl")
    assert len(rows) == 5
    assert {tuple(sorted(row)) for row in rows} == {("messages", "score")}
    assert all(row["score"] > 0 and row["messages"][0]["role"] == "system" for row in rows)
    line = (
        f"sft-gen rows.jsonl --tokenizer {ASSETS} --env math {SOLVED} --allow-negative-scores"
        " --sim.solve_probability 1 --num-seqs-to-save"
    )
    typed(f"{line} 6", tmp_path)
    rows = read_jsonl(tmp_path / "rows.jsonl")
    assert len(rows) == 6
    for row in rows:
        assert row["prefix"].endswith("<|im_start|>assistant\n") and row["score"] == 1.0
        assert row["completion"] and not row["completion"].startswith("<|im_start|>")
    assert "exists" in typed(f"{line} 2", tmp_path, status=2).stderr
    typed(f"{line} 2 --append-to-previous", tmp_path)
    assert read_jsonl(tmp_path / "rows.jsonl")[:6] == rows
    assert len(read_jsonl(tmp_path / "rows.jsonl")) == 8


def trained(python: Path, url: str, batch: int, steps: int) -> dict[str, int]:
    """What the loop of atroposlib's example trainer got."""
    words = [str(python), str(TRAINER), url, str(batch), str(steps)]
    run = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    got: dict[str, int] = json.loads(run.stdout.splitlines()[-1])
    return got


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["code", "tools"])
def test_a_stock_trainer_is_fed_under_the_earlier_name(
    atropos_python: Path, agent: str, tmp_path: Path
) -> None:
    rows = 64
    port = free_port()
    line = (
        f"serve {AS_BEFORE} {SOLVED} {EVEN} --sim.solve_probability 0.5 --env.agent {agent}"
        f" --port {port} --rollouts.max_concurrent 8"
    )
    words = ["-m", "environments.smolagents_integration.smolagents_env", *line.split()]
    with running(*words, "--store", "s.db", folder=tmp_path, program=PYTHON) as server:
        server.wait_for("http://\\S+")
        got = trained(atropos_python, f"http://127.0.0.1:{port}", rows // 4, 4)
    assert got["rows"] == rows // 4 * got["batches"] >= rows
    assert got["trained"] > got["rows"]


@pytest.mark.vllm
@pytest.mark.parametrize("rollouts", [4, pytest.param(64, marks=pytest.mark.slow)])
def test_process_and_serve_on_a_real_vllm(
    vllm_server: VllmServer, atropos_python: Path, rollouts: int, tmp_path: Path
) -> None:
    """Its model is random: what counts is that every rollout comes through, exactly as sampled."""
    url = f"{vllm_server.root_url}/v1"
    common = (
        f"--env gaia --openai.base_url {url} --env.group_size 4 --env.max_steps 2"
        " --sampling.max_tokens 16"
    )
    total = f"--env.total_steps {rollouts // 4} --env.data_path_to_save_groups out.jsonl"
    typed(f"process {common} {total}", tmp_path)
    groups = read_jsonl(tmp_path / "out.jsonl")
    made = [rollout for group in groups for rollout in group["envserver"]["rollouts"]]
    assert len(made) == rollouts
    assert all(any(mask != -100 for mask in row) for group in groups for row in group["masks"])
    with served(f"{common} {EVEN} --store s.db", tmp_path) as (_, url):
        got = trained(atropos_python, url, 4, rollouts // 4)
    assert got["rows"] >= rollouts
