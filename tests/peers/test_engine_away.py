"""A real vLLM that is killed in the middle of conversations and comes back: they go on, exactly."""

import json
import re
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from support.commands import envserver, free_port, read_jsonl, rollouts_of, running, until
from support.vllm_server import MODEL, running_vllm
from support.waiting import PATIENCE

pytestmark = pytest.mark.vllm
TURNS = 24
TALK = (
    "--env", Path(__file__).parents[1] / "benchmarks" / "compare_talk.py", "--env.turns", TURNS,
    "--env.max_turns", TURNS, "--env.group_size", 4, "--env.total_steps", 1,
    "--sampling.max_tokens", 24, "--out", "out.jsonl",
)  # fmt: skip


def answered(url: str) -> int:
    """How many requests vLLM has answered."""
    text = httpx.get(f"{url}/metrics", timeout=PATIENCE).text
    found = re.findall(r"^vllm:request_success_total{.*} ([0-9.]+)", text, re.MULTILINE)
    return int(sum(map(float, found)))


def test_a_vllm_that_was_away_costs_no_rollout(vllm_python: Path, tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    engine = ("--openai.base_url", f"{url}/v1", "--openai.model_name", MODEL)
    with ExitStack() as stack:
        with running_vllm(vllm_python, tmp_path, port=port):
            run = stack.enter_context(running("process", *TALK, *engine, folder=tmp_path))
            until(lambda: answered(url) > TURNS, run.output)
        run.wait_for("call_waits_for_engine")
        with running_vllm(vllm_python, tmp_path, port=port, model=tmp_path / "model"):
            assert run.end() == 0, run.output()
            rollouts = rollouts_of(read_jsonl(tmp_path / "out.jsonl"))
            assert [(one["turns"], one.get("attempts")) for one in rollouts] == [(TURNS, None)] * 4
            ran = envserver("verify", "out.jsonl", *engine, "--json", folder=tmp_path)
    assert (ran.returncode, json.loads(ran.stdout)["findings"]) == (0, [])
