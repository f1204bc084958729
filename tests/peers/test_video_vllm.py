"""A team of `video` on a real vLLM: each agent's conversation is one sequence, exactly as sampled.

The random model is held to a form at each of its turns, so that agents read and report.
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
from collections import Counter

from envserver_environments.video.env import Video


def call(name, arguments):
    head = r'<tool_call>\{"name": "' + name + r'", "arguments": \{'
    return head + arguments + r"\}\}</tool_call>"


READ = {
    "captions": call("get_captions", r'"t0": [1-9]'),
    "transcript": call("get_transcript", r'"t0": [1-9]'),
    "scene_graph": call("get_scene_graph", r'"t1": [1-9]0'),
}
WORDS = "[a-z]{3,8}: \\\\boxed\\{[ABC]\\}"
ASK = call("route", '"next": "captions", "comment": "[a-z]{2,5}"')
DONE = call("route", '"next": "FINAL_ANSWER", "comment": "[a-z]{2,5}", "answer": "[ABC]"')
TURNS = {
    "report": {
        **{name: [read, read, WORDS] for name, read in READ.items()},
        "organizer": [r'\{"reasoning": "[a-z]{3,5}", "answer": "Option [ABC]"\}'],
    },
    "star": {"organizer": [ASK, ASK, DONE], "captions": [READ["captions"], WORDS, WORDS]},
}


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


class HeldVideo(Video):
    """`video` with a model that obeys."""

    def tasks(self, split):
        return (task for task in super().tasks(split) if task.public["video"] == "camp")

    async def rollout(self, task, run):
        return await super().rollout(task, Held(run, TURNS[self.config.mode]))
'''

TEAMS = {
    "report": Counter(captions=3, transcript=3, scene_graph=3, organizer=1),
    "star": Counter(organizer=3, captions=3),
}


@pytest.mark.parametrize("mode", TEAMS)
def test_each_agent_of_a_team_is_one_exact_sequence(
    vllm_server: VllmServer, tmp_path: Path, mode: str
) -> None:
    path = tmp_path / "held.py"
    path.write_text(HELD)
    with relay(vllm_server.root_url) as (url, echoes):
        ran = envserver(
            "process", "--env", f"{path}:HeldVideo", "--env.mode", mode,
            "--openai.base_url", url, "--openai.model_name", vllm_server.model,
            "--tokens.constraints", "all",
            "--tokens.train", "structured_output_masked",
            "--sampling.max_tokens", 256, "--env.group_size", 2, "--env.total_steps", 2,
            "--env.data_path_to_save_groups", "out.jsonl", folder=tmp_path,
        )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    groups = read_jsonl(tmp_path / "out.jsonl")
    rollouts = [rollout for group in groups for rollout in group["envserver"]["rollouts"]]
    assert len(rollouts) == 4
    turns: Counter[str] = Counter()
    for group in groups:
        for rollout in group["envserver"]["rollouts"]:
            # The organizer of a report speaks only where the experts do not agree.
            asked = set(TEAMS[mode]) - ({"organizer"} if _agreed(rollout) else set())
            assert set(rollout["agents"]) == asked and len(rollout["agents"]) == len(asked)
            turns.update({name: TEAMS[mode][name] for name in asked})
    assert len(echoes) == turns.total()
    assert _delivered(groups) == Counter(
        (token, float(np.float32(logprob)))
        for echo in echoes
        for token, logprob in zip(echo.completion_ids, echo.logprobs, strict=True)
    )
    rows = [tokens for group in groups for tokens in group["tokens"]]
    for echo in echoes:
        seen = echo.prompt_ids + echo.completion_ids
        assert any(tokens[: len(seen)] == seen for tokens in rows)


def _agreed(rollout: dict[str, dict[str, float]]) -> bool:
    return rollout["agent_metrics"].get("disagreed") == 0.0


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
