"""From nothing to a fine-tuned, merged and evaluated model: the commands that
clients/envserver_clients/finetuning/README.md shows, with the tiny model. `make test-all` runs them
with smaller numbers, `make test-slow` as they stand there.
"""

import json
import re
import shlex
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.commands import environment_variables
from support.learning import ROOT, tiny_model
from support.waiting import PATIENCE

README = ROOT / "clients" / "envserver_clients" / "finetuning" / "README.md"
_SMALLER = {"--steps": "4", "--batch-size": "8", "--env.total_steps": "8"}
"""Values of flags with which the commands do all that they do, and teach nothing."""


def commands(block: int) -> list[list[str]]:
    text = re.findall(r"```sh\n(.*?)```", README.read_text(), re.DOTALL)[block]
    return [shlex.split(line) for line in text.splitlines() if not line.startswith("#")]


def run(words: list[str], learn_python: Path, folder: Path) -> str:
    """What a command said; the test fails with it."""
    done = subprocess.run(
        [learn_python.with_name(words[0]), *words[1:]],
        cwd=folder,
        env=environment_variables() | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=4 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-6000:]}"
    return done.stdout


def built(learn_python: Path, folder: Path, values: dict[str, str]) -> Path:
    """Runs the commands of the first block in a folder; the tiny model is made once for all tests.

    Args:
        values: by flag, instead of the README's.
    """
    (folder / "clients").symlink_to(ROOT / "clients")
    (folder / "out").mkdir()
    first, *others = commands(0)
    assert first == ["envserver", "models", "tiny", "out/tiny"]
    (folder / "out" / "tiny").symlink_to(tiny_model(learn_python))
    for words in others:
        run([values.get(flag, word) for flag, word in pairwise(["", *words])], learn_python, folder)
    return folder


@pytest.fixture(scope="module")
def factory(learn_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all commands of the first block were run."""
    return built(learn_python, tmp_path_factory.mktemp("factory"), {})


def mean_reward(folder: Path) -> float:
    report = json.loads((folder / "report.json").read_text())
    assert report["complete"]
    return float(report["run"]["overall"]["mean_reward"]["value"])


def judge_merged(folder: Path, out: str, base: str, sft: str, rl: str) -> None:
    """base + alpha * (rl - sft), tensor by tensor."""
    models = [load_file(folder / name / "model.safetensors") for name in (base, sft, rl)]
    for alpha in (0.5, 1.0):
        merged = load_file(folder / out / f"alpha-{alpha}" / "model.safetensors")
        assert merged.keys() == models[0].keys()
        for name, value in merged.items():
            first, minus, plus = (model[name].astype(np.float64) for model in models)
            wanted = (first + alpha * (plus - minus)).astype(np.float32)
            np.testing.assert_allclose(value, wanted, rtol=2e-7, atol=1e-9)


def judge(folder: Path, least_rows: int) -> tuple[float, float]:
    """Every row was trained on, and merged is what was trained; the mean rewards before, after."""
    unified = list((folder / "data" / "unified").rglob("*.json"))
    summary = json.loads((folder / "data" / "sft" / "SUMMARY.json").read_text())
    counts = json.loads((folder / "out" / "sft" / "training.json").read_text())["counts"]
    assert summary["reason"]["train"] == counts["examples"] == counts["rows"] > least_rows
    assert len(unified) > sum(summary["reason"].values()) - 1  # a manifest may lie with them
    judge_merged(folder, "out/merged", "out/tiny", "out/tiny", "out/sft")
    before, after = (mean_reward(folder / "runs" / name) for name in ("base", "merged"))
    return before, after


def test_each_command_does_its_part(learn_python: Path, tmp_path: Path) -> None:
    judge(built(learn_python, tmp_path, _SMALLER), 4)
    lines = (tmp_path / "out" / "sft" / "metrics.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_from_nothing_to_a_fine_tuned_model(factory: Path, tell: Callable[[str], None]) -> None:
    before, after = judge(factory, 40)
    tell(f"mean reward on what was taught: {before:.2f} -> {after:.2f}")
    assert after > before + 0.3


@pytest.mark.slow
def test_preferences_go_on(learn_python: Path, factory: Path, tell: Callable[[str], None]) -> None:
    for words in commands(1):
        run(words, learn_python, factory)
    judge_merged(factory, "out/reasoning", "out/tiny", "out/sft", "out/dpo")
    lines = (factory / "out" / "dpo" / "metrics.jsonl").read_text().splitlines()
    margins = [json.loads(line)["rewards/margins"] for line in lines]
    assert margins[-1] > margins[0]
    before, after = (mean_reward(factory / "runs" / name) for name in ("base-test", "dpo"))
    tell(f"mean reward on what was not taught: {before:.2f} -> {after:.2f}")
    assert after > before


@pytest.mark.slow
def test_a_sweep_finds_how_much_of_it_is_best(
    learn_python: Path, factory: Path, tell: Callable[[str], None]
) -> None:
    """With the local engine; its first and last point are the models before and after."""
    sweep, publish = commands(2)
    run(sweep, learn_python, factory)
    found = json.loads((factory / "runs" / "sweep" / "sweep.json").read_text())["points"]
    rewards = [point["rewards"]["math"]["value"] for point in found]
    tell(f"mean reward at alpha 0, 0.5, 1: {rewards}")
    assert [point["alpha"] for point in found] == [0, 0.5, 1] and rewards[2] > rewards[0] + 0.3
    assert "Merging" not in run(sweep, learn_python, factory)
    told = run(publish, learn_python, factory)
    assert "model-index:" in told and "model.safetensors" in told
