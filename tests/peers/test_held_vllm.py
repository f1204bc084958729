"""`router`, `tau` and `video` on a real vLLM: each agent's conversation is one exact sequence.

The random model is held to a form at each of its turns, so that plans are valid and one is
repaired, and agents call tools, talk and report.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import envserver, read_jsonl
from support.relay import Relay, begins_a_row, relay, sampled, trained
from support.vllm_server import VllmServer

pytestmark = pytest.mark.vllm

HELD = r'''
from collections import Counter


class Held:
    """A run whose agents say something of the form of their turn."""

    def __init__(self, run, turns):
        self.run, self.turns, self.asked = run, turns, Counter()

    def __getattr__(self, name):
        return getattr(self.run, name)

    async def chat(self, messages, *, agent, **how):
        form = self.turns[agent][self.asked[agent]]
        self.asked[agent] += 1
        return await self.run.chat(
            messages, agent=agent, structured_outputs={"regex": form}, **how
        )


def call(name, arguments=""):
    head = r'<tool_call>\{"name": "' + name + r'", "arguments": \{'
    return head + arguments + r"\}\}</tool_call>"

'''


def played(
    engine: VllmServer, folder: Path, environment: str, source: str, max_tokens: int, *words: object
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Relay]:
    """The groups that the environment of `source` makes, their rollouts, what the engine said."""
    path = folder / "held.py"
    path.write_text(HELD + source)
    with relay(engine.root_url) as (url, echoes):
        ran = envserver(
            "process", "--env", f"{path}:{environment}", *words,
            "--openai.base_url", url, "--openai.model_name", engine.model,
            "--tokens.constraints", "all",
            "--tokens.train", "structured_output_masked",
            "--sampling.max_tokens", max_tokens, "--env.group_size", 2,
            "--env.data_path_to_save_groups", "out.jsonl", folder=folder,
        )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    groups = list(read_jsonl(folder / "out.jsonl"))
    return groups, [one for group in groups for one in group["envserver"]["rollouts"]], echoes


ROUTER = r'''
import json
import re

from envserver_environments.router.env import Router
from envserver_environments.router.known import chain
from envserver_environments.router.plans import as_json

CHAIN = json.dumps(as_json(chain(("search", "math", "code"))))
PLAN = re.escape(CHAIN).replace("needed", "[a-z]{3,8}")
TURNS = {
    "router": ["[a-z]{3,9} then [a-z]{3,9}", PLAN],
    "search": [call("search", '"query": "[a-z]{4,8}"'), call("finish", '"answer": "[1-9]{2}"')],
    "math": [
        call("calculate", r'"expression": "[1-9] \* [1-9]"'),
        call("finish", '"answer": "[1-9]"'),
    ],
    "code": ["```python\nprint\\([1-9]{2}\\)\n```"],
}


class HeldRouter(Router):
    """`router` with a model that obeys."""

    def tasks(self, split):
        return (task for task in super().tasks(split) if task.hidden["answer"])

    async def rollout(self, task, run):
        return await super().rollout(task, Held(run, TURNS))
'''
CALLS = {"router": 2, "search": 2, "math": 2, "code": 1}


@pytest.mark.parametrize("is_trained", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_each_agent_of_a_plan_is_one_exact_sequence(
    vllm_server: VllmServer, tmp_path: Path, is_trained: bool
) -> None:
    whether = [
        word for agent in ("search", "math", "code")
        for word in (f"--env.agents.{agent}.trained", str(is_trained).lower())
    ]  # fmt: skip
    groups, rollouts, echoes = played(
        vllm_server, tmp_path, "HeldRouter", ROUTER, 512,
        "--env.execute", "true", *whether, "--env.total_steps", 1,
    )  # fmt: skip
    assert len(rollouts) == 2 and len(echoes) == 2 * sum(CALLS.values())
    asked = list(CALLS) if is_trained else ["router"]
    for rollout in rollouts:
        assert rollout["metrics"]["repaired"] == 1.0 and rollout["components"]["valid"] == 1.0
        assert rollout["agents"] == asked
    delivered, said = trained(groups), sampled(echoes)
    assert delivered == said if is_trained else delivered < said
    whole = sum(begins_a_row(echo, groups) for echo in echoes)
    assert whole == 2 * sum(CALLS[agent] for agent in asked)


TAU = r'''
from envserver_environments.tau.env import Tau

WORDS = "[a-z]{3,8} [a-z]{3,8}"
TURNS = {
    "user": [WORDS, call("check_notifications"), WORDS, "###STOP###"],
    "agent": [
        call("get_users"),
        WORDS,
        call("update_task_status", r'"task_id": "t1", "status": "(pending|completed)"'),
        WORDS,
    ],
}


class HeldTau(Tau):
    """`tau` with models that obey."""

    async def rollout(self, task, run):
        return await super().rollout(task, Held(run, TURNS))
'''
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
    groups, rollouts, echoes = played(
        vllm_server, tmp_path, "HeldTau", TAU, 200, "--env.domain", "mock",
        "--env.tau2_data", data, "--env.agents.user.trained", str(user_trained).lower(),
    )  # fmt: skip
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
