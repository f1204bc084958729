"""`sft build` with its own templates makes rows of every environment, and teaches no failure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.commands import envserver

pytestmark = pytest.mark.thorough
ENVIRONMENTS = ("code", "gaia", "math", "mhqa", "router", "swe", "tau", "video")


def test_every_environment_yields_rows(tmp_path: Path) -> None:
    pytest.importorskip("smolagents", reason="smolagents (extra gaia) is not installed")
    sim = "--model sim --sim.latency_seconds 0 --env.total_steps 2 --env.group_size 2"
    for name in ENVIRONMENTS:
        words = f"process --env {name} {sim} --env.include_actions true --out {name}.jsonl"
        made = envserver(*words.split(), folder=tmp_path)
        assert made.returncode == 0, made.stderr
    files = [f"{name}.jsonl" for name in ENVIRONMENTS]
    assert envserver("convert", *files, "--out", "unified", folder=tmp_path).returncode == 0
    built = envserver("sft", "build", "unified", "--out", "sft", folder=tmp_path)
    assert built.returncode == 0, built.stderr
    rows = [
        json.loads(line)
        for path in (tmp_path / "sft").glob("*/*.jsonl")
        for line in path.read_text().splitlines()
    ]
    yields = {
        name: {row["tool"] for row in rows if row["meta"]["domain"] == name}
        for name in ENVIRONMENTS
    }
    assert all(tools - {"finalize"} for tools in yields.values()), yields
    for name in ENVIRONMENTS:
        assert f"{name}: " in built.stdout
    # A plan that was refused is no plan to learn.
    assert all("steps" in json.loads(row["output"]) for row in rows if row["tool"] == "plan")
