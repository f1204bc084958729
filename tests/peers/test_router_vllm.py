"""Plans of `router` that are run on a real vLLM: each agent's conversation is one exact sequence.

The random model is held to a form at each of its turns, so that plans are valid, one is repaired,
and sub-agents call their tools.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.commands import envserver, read_jsonl
from support.relay import relay
from support.vllm_server import VllmServer

pytestmark = pytest.mark.vllm

HELD = r'''
import json
import re
from collections import Counter

from envserver_environments.router.env import Router
from envserver_environments.router.known import chain
from envserver_environments.router.plans import as_json


def call(name, argument, form):
    head = r'<tool_call>\{"name": "' + name + r'", "arguments": \{"' + argument
    return head + '": "' + form + r'"\}\}</tool_call>'


CHAIN = json.dumps(as_json(chain(("search", "math", "code"))))
PLAN = re.escape(CHAIN).replace("needed", "[a-z]{3,8}")
TURNS = {
    "router": ["[a-z]{3,9} then [a-z]{3,9}", PLAN],
    "search": [call("search", "query", "[a-z]{4,8}"), call("finish", "answer", "[1-9]{2}")],
    "math": [call("calculate", "expression", r"[1-9] \* [1-9]"), call("finish", "answer", "[1-9]")],
    "code": ["```python\nprint\\([1-9]{2}\\)\n```"],
}


class Held:
    """A run whose agents say something of the form of their turn."""

    def __init__(self, run):
        self.run, self.asked = run, Counter()

    def __getattr__(self, name):
        return getattr(self.run, name)

    async def chat(self, messages, *, agent, **how):
        form = TURNS[agent][self.asked[agent]]
        self.asked[agent] += 1
        return await self.run.chat(
            messages, agent=agent, structured_outputs={"regex": form}, **how
        )


class HeldRouter(Router):
    """`router` with a model that obeys."""

    def tasks(self, split):
        return (task for task in super().tasks(split) if task.hidden["answer"])

    async def rollout(self, task, run):
        return await super().rollout(task, Held(run))
'''
CALLS = {"router": 2, "search": 2, "math": 2, "code": 1}


@pytest.mark.parametrize("trained", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_each_agent_of_a_plan_is_one_exact_sequence(
    vllm_server: VllmServer, tmp_path: Path, trained: bool
) -> None:
    path = tmp_path / "held.py"
    path.write_text(HELD)
    whether = [
        word for agent in ("search", "math", "code")
        for word in (f"--env.agents.{agent}.trained", str(trained).lower())
    ]  # fmt: skip
    with relay(vllm_server.root_url) as (url, echoes):
        ran = envserver(
            "process", "--env", f"{path}:HeldRouter", "--env.execute", "true", *whether,
            "--openai.base_url", url, "--openai.model_name", vllm_server.model,
            "--tokens.constraints", "all",
            "--tokens.train", "structured_output_masked",
            "--sampling.max_tokens", 512, "--env.group_size", 2, "--env.total_steps", 1,
            "--env.data_path_to_save_groups", "out.jsonl", folder=tmp_path,
        )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    groups = read_jsonl(tmp_path / "out.jsonl")
    rollouts = [rollout for group in groups for rollout in group["envserver"]["rollouts"]]
    assert len(rollouts) == 2 and len(echoes) == 2 * sum(CALLS.values())
    asked = list(CALLS) if trained else ["router"]
    for rollout in rollouts:
        assert rollout["metrics"]["repaired"] == 1.0 and rollout["components"]["valid"] == 1.0
        assert rollout["agents"] == asked
    sampled = Counter(
        (token, float(np.float32(logprob)))
        for echo in echoes
        for token, logprob in zip(echo.completion_ids, echo.logprobs, strict=True)
    )
    delivered = _delivered(groups)
    assert delivered == sampled if trained else delivered < sampled
    rows = [tokens for group in groups for tokens in group["tokens"]]
    seen = [echo.prompt_ids + echo.completion_ids for echo in echoes]
    whole = sum(any(tokens[: len(ids)] == ids for tokens in rows) for ids in seen)
    assert whole == 2 * sum(CALLS[agent] for agent in asked)


def _delivered(groups: list[dict[str, list[list[float]]]]) -> Counter[tuple[float, float]]:
    """Every trained token with its logprob."""
    return Counter(
        (token, float(np.float32(logprob)))
        for group in groups
        for tokens, masks, logprobs in zip(
            group["tokens"], group["masks"], group["inference_logprobs"], strict=True
        )
        for token, mask, logprob in zip(tokens, masks, logprobs, strict=True)
        if mask != -100
    )
