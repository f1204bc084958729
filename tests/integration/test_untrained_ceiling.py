"""A run whose flags keep much from training says so, and offers no further such groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from support.commands import envserver, free_port, read_jsonl, running, until
from support.waiting import PATIENCE

ENVIRONMENT = '''
from envserver import Environment, Score, Task

class Formal(Environment):
    """Its agent asks twice, once for an answer that a grammar holds to JSON."""

    def tasks(self, split):
        for number in range(6):
            yield Task(f"t{number}", {}, {})

    async def rollout(self, task, run):
        said = [{"role": "user", "content": "How much is 2 + 2?"}]
        await run.chat(said, response_format={"type": "json_object"})
        return (await run.chat(said)).content

    def score(self, task, result):
        return Score(reward=0.5)
'''
RUN = (
    "--env", "formal.py", "--model", "sim", "--sim.latency_seconds", 0, "--env.group_size", 2,
    "--workers.processes", 1, "--rollouts.max_concurrent", 2,
    "--tokens.untrained_window_groups", 2,
)  # fmt: skip
OUT = ("--env.data_path_to_save_groups", "out.jsonl")


@pytest.mark.thorough
def test_process_ends_and_names_the_flags_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "formal.py").write_text(ENVIRONMENT)
    ran = envserver("process", *RUN, *OUT, folder=tmp_path)
    assert ran.returncode == 1, ran.stderr
    said = " ".join((ran.stdout + ran.stderr).split())
    assert "of the tokens sampled in the last 2 groups are not trained" in said
    assert "--tokens.train structured_output_masked trains them" in said
    assert "% of the sampled tokens are not trained: structured_output_masked" in said
    lines = read_jsonl(tmp_path / "out.jsonl")
    assert 1 <= len(lines) < 6
    masks = [mask for line in lines for mask in line["masks"]]
    assert all(any(label != -100 for label in mask) for mask in masks)
    for more in (
        ("--tokens.max_untrained_share", 1),
        ("--tokens.train", "structured_output_masked"),
    ):
        ran = envserver("process", *RUN, *OUT, *more, "--overwrite", folder=tmp_path)
        assert ran.returncode == 0, ran.stderr
        assert len(read_jsonl(tmp_path / "out.jsonl")) == 6


def test_serve_stops_offering_them(tmp_path: Path) -> None:
    (tmp_path / "formal.py").write_text(ENVIRONMENT)
    port = free_port()
    words = ("--port", port, "--env.ensure_scores_are_not_same", "false", "--store", "groups.db")
    with running("serve", *RUN, *words, folder=tmp_path) as server:
        server.wait_for("Trainers: ")
        url = f"http://127.0.0.1:{port}"

        def status() -> dict[str, Any]:
            return dict(httpx.get(f"{url}/v1/status", timeout=PATIENCE).json()["server"])

        def both() -> dict[str, Any] | None:
            """Groups were delivered, before the window was full, and dropped."""
            now = status()
            return now if now["groups_dropped"] and now["groups_delivered"] else None

        told = until(both, server.output, alive=server.process)
        assert told["groups_dropped"].keys() == {"untrained"}
        formal = told["untrained"]["formal"]
        assert (formal["over"], formal["ceiling"]) == (True, 0.1)
        assert formal["share"] > 0.1
        assert "--tokens.train structured_output_masked" in formal["message"]
        metrics = httpx.get(f"{url}/metrics", timeout=PATIENCE).text
        assert 'envserver_untrained_tokens_total{environment="formal",flag="structured' in metrics
        assert 'envserver_untrained_share{environment="formal"} 0.' in metrics
        assert "untrained_over_ceiling" in server.output()
