"""`envserver sweep`: what it finds and draws, and that nothing is done twice. The engine is the
simulated one, better with a larger alpha; tests/peers/test_factory.py has real ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from support.models_on_disk import floats, read_model, write_model

from envserver import main
from envserver.cli import sweep_command
from envserver.running.evaluating import Evaluation, Member

WORDS = [
    *("--env", "math", "--env.total_steps", "3", "--env.group_size", "2", "--no_baselines"),
    *("--sim.latency_seconds", "0", "--sim.openers", "false", "--env.mode", "single"),
]


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the models that were evaluated, in order."""
    real, names = sweep_command.evaluate_members, []

    async def simulated(members: Sequence[Member[Any]], *given: Any, **more: Any) -> Evaluation:
        for member in members:
            name = Path(member.settings.model).name
            alpha = float(name.removeprefix("alpha-")) if "alpha" in name else 0.0
            member.settings.model = "sim"
            member.settings.sim.solve_probability = alpha
        names.append(name)
        return await real(members, *given, **more)

    monkeypatch.setattr(sweep_command, "evaluate_members", simulated)
    return names


@pytest.mark.thorough
def test_a_sweep_merges_evaluates_and_draws_once(
    tmp_path: Path, evaluated: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, name in enumerate(("base", "tuned")):
        write_model(tmp_path / name, {"model.norm.weight": ("F32", np.full(4, seed, np.float32))})
    out = tmp_path / "out"
    models = ["--base", str(tmp_path / "base"), "--tuned", str(tmp_path / "tuned")]
    words = ["sweep", *models, *WORDS, "--out", str(out)]
    assert main([*words, "--alpha", "0,0.5", "--keep", "best"]) == 0
    assert evaluated == ["base", "alpha-0.5"]
    assert main([*words, "--alpha", "1,0.5", "--keep", "best"]) == 0
    assert evaluated[2:] == ["alpha-1.0"]
    assert [path.name for path in (out / "models").iterdir()] == ["alpha-1.0"]
    merged = read_model(out / "models" / "alpha-1.0")["model.norm.weight"]
    assert floats(merged).tolist() == [1.0] * 4
    card = (out / "models" / "alpha-1.0" / "README.md").read_text()
    assert "type: envserver/math" in card and "| math | test | 3 | 6 | 1.000 |" in card

    found = json.loads((out / "sweep.json").read_text())
    rewards = {one["alpha"]: one["rewards"]["math"]["value"] for one in found["points"]}
    assert list(rewards) == [0.0, 0.5, 1.0] and (rewards[0.0], rewards[1.0]) == (0.0, 1.0)
    circles = ElementTree.parse(out / "sweep.svg").getroot().findall("{*}circle")
    heights = [float(one.attrib["cy"]) for one in circles]
    assert len(circles) == 3 and heights[0] > heights[1] > heights[2]
    told = capsys.readouterr()
    assert told.out.splitlines()[-1] == str(out / "sweep.svg")
    assert "1 *" in told.err and "Best: alpha 1" in told.err

    os.utime(tmp_path / "tuned" / "model.safetensors", (1, 1))  # other weights, as far as told
    assert main([*words, "--alpha", "1"]) == 2
    assert "a sweep of other models" in capsys.readouterr().err
    assert main([*words, "--alpha", "1,1"]) == 2
    assert main([*words, "--model", "sim"]) == 2
    assert len(evaluated) == 3
