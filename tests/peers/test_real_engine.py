"""On a real vLLM: what is delivered is, token by token, what the engine saw and sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from envserver_clients.http import SyncEnvClient
from envserver_clients.records import Row
from support.commands import envserver, free_port, read_jsonl, running
from support.relay import begins_a_row, relay, sampled, trained
from support.vllm_server import VllmServer
from support.waiting import PATIENCE

pytestmark = pytest.mark.vllm

THREE_TURNS = '''
from envserver import Environment, Score, Task

class ThreeTurns(Environment):
    """Talk three times, once streamed; the answer's length is the score."""

    def tasks(self, split):
        for n in range(100):
            yield Task(f"talk-{n}", {"question": f"Tell me about {n}."}, {"wanted": n})

    async def rollout(self, task, run):
        messages = [{"role": "user", "content": task.public["question"]}]
        for turn in range(3):
            if turn == 1:
                content = await self.streamed(messages, run)
            else:
                content = (await run.chat(messages, max_tokens=12)).content
            messages += [
                {"role": "assistant", "content": content},
                {"role": "user", "content": f"And then? {turn}"},
            ]
        return messages[-2]["content"]

    async def streamed(self, messages, run):
        chunks = await run.client.chat.completions.create(
            model=run.model, messages=messages, max_tokens=12, stream=True
        )
        return "".join([c.choices[0].delta.content or "" async for c in chunks if c.choices])

    def score(self, task, result):
        return Score(reward=len(result.output) % 10 / 10)
'''


def flags(base_url: str, model: str) -> tuple[object, ...]:
    address = ("--openai.base_url", base_url, "--openai.model_name", model)
    return (*address, "--sampling.max_tokens", 24)


def processed(folder: Path, *words: object) -> list[dict[str, Any]]:
    """The groups that a `process` makes."""
    save = ("--env.data_path_to_save_groups", "out.jsonl")
    ran = envserver("process", *words, *save, folder=folder)
    assert ran.returncode == 0, ran.stderr
    return read_jsonl(folder / "out.jsonl")


def test_several_turns_streamed_or_not_are_exact(vllm_server: VllmServer, tmp_path: Path) -> None:
    path = tmp_path / "talk.py"
    path.write_text(THREE_TURNS)
    with relay(vllm_server.root_url) as (url, echoes):
        words = ("--env", path, *flags(url, vllm_server.model))
        groups = processed(tmp_path, *words, "--env.group_size", 4, "--env.total_steps", 6)
    assert len(echoes) == 6 * 4 * 3
    assert trained(groups) == sampled(echoes)
    assert all(begins_a_row(echo, groups) for echo in echoes)
    # Conversations are continued by tokens: hardly any of them takes more than one row.
    assert sum(len(group["tokens"]) for group in groups) < len(echoes) / 2
    rendering = groups[0]["envserver"]["rendering"]
    told = [rendering[name] for name in ("mode", "continues", "think")]
    assert told == ["tokens", True, "template"]


def test_serve_delivers_exactly_what_vllm_sampled(vllm_server: VllmServer, tmp_path: Path) -> None:
    port = free_port()
    with (
        relay(vllm_server.root_url) as (url, echoes),
        running(
            "serve", "--env", "math", "--env.mode", "single", *flags(url, vllm_server.model),
            "--env.group_size", 2,
            "--env.ensure_scores_are_not_same", "false", "--env.total_steps", 3,
            "--port", port, "--store", "groups.db", folder=tmp_path,
        ) as server,
    ):  # fmt: skip
        server.wait_for("Trainers: ")
        groups = []
        with SyncEnvClient(f"http://127.0.0.1:{port}", run="trainer", batch_size=1) as client:
            for _ in range(3):
                batch = next(client.batches(idle_seconds=PATIENCE))
                groups += [as_lists(batch.rows)]
                client.ack(batch)
        assert server.end() == 0
    assert trained(groups) == sampled(echoes)
    assert all(begins_a_row(echo, groups) for echo in echoes)


def as_lists(rows: list[Row]) -> dict[str, Any]:
    """The rows in the form in which `process` writes them."""
    return {
        "tokens": [row.tokens.tolist() for row in rows],
        "masks": [np.where(row.mask, row.tokens, -100).tolist() for row in rows],
        "inference_logprobs": [np.where(row.mask, row.logprobs, 1.0).tolist() for row in rows],
    }
