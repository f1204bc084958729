"""`tau` on a real vLLM: each agent's conversation is one exact sequence.

The random model is held to a form at each of its turns, so that agents call tools and talk.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from support.cases import cases_of
from support.commands import envserver, read_jsonl
from support.relay import begins_a_row, relay, sampled, trained
from support.vllm_server import VllmServer

CASES = cases_of(__file__)

pytestmark = pytest.mark.vllm

DONE = {"name": "update_task_status", "arguments": {"task_id": "t1", "status": "completed"}}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A to-do list in tau2-bench's format (mock), short enough for the model's context."""
    folder = tmp_path / "tau2" / "mock"
    folder.mkdir(parents=True)
    task = {"task_id": "t1", "title": "First", "status": "pending"}
    user = {"user_id": "u", "name": "Uma", "tasks": ["t1"]}
    note = {"notification_id": "n1", "message": "t1 is yours"}
    scenario = {"instructions": "Have t1 finished; SECRET-WISH."}
    asked = {"user_scenario": scenario, "evaluation_criteria": {"actions": [DONE]}}
    contents: dict[str, Any] = {
        "db": {"tasks": {"t1": task}, "users": {"u": user}},
        "user_db": {"notifications": {"n1": note}},
        "tasks": [{"id": "one", **asked}, {"id": "two", **asked}],
    }
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "policy.md").write_text("Finish what its owner wants finished.")
    return folder.parent


@pytest.mark.parametrize("user_trained", [pytest.param(False, marks=pytest.mark.slow), True])
def test_each_side_of_a_talk_is_one_exact_sequence(
    vllm_server: VllmServer, tmp_path: Path, data: Path, user_trained: bool
) -> None:
    """The customer is played by the model, too."""
    path = tmp_path / "held.py"
    path.write_text(CASES["held"])
    with relay(vllm_server.root_url) as (url, echoes):
        ran = envserver(
            "process", "--env", f"{path}:HeldTau", "--env.domain", "mock",
            "--env.tau2_data", data, "--env.agents.user.trained", str(user_trained).lower(),
            "--openai.base_url", url, "--openai.model_name", vllm_server.model,
            "--tokens.constraints", "all",
            "--tokens.train", "structured_output_masked",
            "--sampling.max_tokens", 200, "--env.group_size", 2,
            "--env.data_path_to_save_groups", "out.jsonl", folder=tmp_path,
        )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    groups = list(read_jsonl(tmp_path / "out.jsonl"))
    rollouts = [one for group in groups for one in group["envserver"]["rollouts"]]
    ends = [(len(one["rows"]), one["limit"], one["metrics"], one["flags"]) for one in rollouts]
    assert len(rollouts) == 4 and len(echoes) == 4 * 8, ends
    sides = ["agent", "user"] if user_trained else ["agent"]
    for rollout in rollouts:
        assert sorted(rollout["agents"]) == sides
        (user,) = rollout["others"]
        assert (user["agent"], user["trained"], user["turns"]) == ("user", user_trained, 4)
        assert "SECRET-WISH" in user["messages"][0]["content"]
        assert rollout["metrics"]["ended_user_stop"] == 1.0
    for group in groups:
        told = json.dumps(group["messages"][0])
        assert ("SECRET-WISH" in told) == (group["envserver"]["rollouts"][0]["agents"][0] == "user")
    kept = [echo for echo in echoes if user_trained or begins_a_row(echo, groups)]
    assert len(kept) == 4 * 4 * len(sides)
    assert trained(groups) == sampled(kept)
