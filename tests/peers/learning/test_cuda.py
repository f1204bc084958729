"""The trainer on a GPU computes what it does on a CPU. `slow`, and skipped where there is none:

.venv-learn/bin/python -m pytest -m slow tests/peers/learning/test_cuda.py
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from envserver_clients.training.ranks import Ranks
from support.gradients import difference
from support.rank_cases import CASES, STEPS, stepped, trained
from support.tiny_model import main as make_tiny
from support.tiny_vlm import main as make_seeing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use"),
]

TESTS = Path(__file__).parents[2]
FLOAT32 = 5e-5
"""Relative difference of the gradients, whose sums have other orders; 3e-6 to 1.4e-5 were seen."""
BFLOAT16 = 0.15
"""0.01 between a GPU and a CPU, 0.05 between bfloat16 and float32 were seen."""


def most(name: str) -> float:
    return BFLOAT16 if CASES[name].dtype == "bfloat16" else FLOAT32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny(folder)
    make_seeing(folder / "sees", "qwen2_5_vl")
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_gpu_has_the_gradient_of_a_cpu(
    name: str, model: Path, record_property: Callable[[str, object], None]
) -> None:
    expected, numbers = stepped(CASES[name], model, Ranks())
    found, same = stepped(CASES[name], model, Ranks(device="cuda"))
    away = difference(found, expected)
    record_property("away", away)
    assert away < most(name)
    if CASES[name].dtype == "float32":
        assert same == pytest.approx(numbers, rel=1e-3, abs=1e-5)


def test_bfloat16_is_near_float32(
    model: Path, record_property: Callable[[str, object], None]
) -> None:
    exact, half = CASES["bfloat16, exactly"], CASES["bfloat16"]
    expected, _ = stepped(exact, model, Ranks())
    found, _ = stepped(half, model, Ranks(device="cuda"))
    away = difference(found, expected)
    record_property("away", away)
    assert away < BFLOAT16


def test_a_rank_over_nccl_has_the_gradient_of_a_cpu_and_continues_its_checkpoint(
    model: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """With FSDP2, as on several GPUs, each of which needs a rank of its own."""
    trained(model, tmp_path / "one", STEPS)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    words += ["-m", "support.rank_cases", model, tmp_path, "cuda", *CASES]
    subprocess.run(words, cwd=TESTS, timeout=600, check=True)
    for name in CASES:
        expected, _ = stepped(CASES[name], model, Ranks())
        found, _ = torch.load(tmp_path / f"{name}.pt")
        away = difference(found, expected)
        record_property(name, away)
        assert away < most(name), name
    straight = trained(model, tmp_path / "straight", 2 * STEPS)
    for weights in (torch.load(tmp_path / "one.pt"), trained(model, tmp_path / "two", STEPS)):
        away = difference(weights, straight)
        record_property("weights", away)
        assert away < FLOAT32
