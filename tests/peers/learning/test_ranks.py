"""Two ranks of torchrun learn what one process learns: real processes, gloo, a tiny model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from envserver_clients.training.loss import token_logprobs
from envserver_clients.training.policy import Policy
from envserver_clients.training.ranks import Ranks
from peft import PeftModel
from safetensors.torch import load_file
from support.gradients import difference
from support.rank_cases import CASES, STEPS, TOKENS, Case, continued, learner, stepped, trained
from support.tiny_model import main as make_tiny
from support.tiny_vlm import main as make_seeing
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)

TESTS = Path(__file__).parents[2]
MOST_DIFFERENCE = 2e-6
"""Relative difference of the gradients in float32; the sums have other orders."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny(folder)
    make_seeing(folder / "sees", "qwen2_5_vl")
    return folder


@pytest.fixture(scope="module")
def straight(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The weights after twice `STEPS` steps in one process."""
    return trained(model, tmp_path_factory.mktemp("straight"), 2 * STEPS)


# These need several rows for an advantage or a bound, and another rank may have some of them.
OF_SEVERAL_ROWS = {"gspo", "gdpo", "reinforce_pp", "sequence_mis"}
"""Other objectives are slow tests: what they add to a row's loss does not depend on the ranks."""


@pytest.fixture(scope="module")
def by_two(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The files that two ranks write, of the cases that are tested; see the program."""
    tested = [getattr(item, "callspec", None) for item in request.session.items]
    named = {one.params.get("name") for one in tested if one is not None}
    folder = tmp_path_factory.mktemp("ranks")
    trained(model, folder / "one", STEPS)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += ["-m", "support.rank_cases"]
    done = subprocess.run(
        [*words, model, folder, "cpu", *(name for name in CASES if name in named)],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.slow] if case.objective and name not in OF_SEVERAL_ROWS else [],
        )
        for name, case in CASES.items()
    ],
)
def test_two_ranks_have_the_gradient_of_one(name: str, model: Path, by_two: Path) -> None:
    expected, numbers = stepped(CASES[name], model, Ranks())
    found, same = torch.load(by_two / f"{name}.pt")
    if CASES[name].dtype == "bfloat16":  # the sums between the layers are rounded, too
        assert difference(found, expected) < 0.15
        assert all(value.dtype == torch.float32 for value in found.values())
        return
    # The first update divides each gradient by its size, so that of rounding errors grows.
    most = MOST_DIFFERENCE if CASES[name].updates == 1 else 1e-5
    if CASES[name].objective:  # bounds close to the sampling policy's own: sums nearly cancel
        most = 4e-6
    assert difference(found, expected) < most
    assert same == pytest.approx(numbers, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("denominator", ["trajectory", "token", "constant"])
def test_packed_rows_have_the_gradient_of_padded_ones(denominator: str, model: Path) -> None:
    expected, _ = stepped(CASES[denominator], model, Ranks())
    found, _ = stepped(CASES[f"{denominator}, packed"], model, Ranks())
    assert difference(found, expected) < MOST_DIFFERENCE
    other, _ = stepped(Case("token" if denominator != "token" else "constant"), model, Ranks())
    assert difference(other, expected) > 0.01  # what is compared differs between the cases


def test_one_process_of_torchrun_has_its_gradient_too(model: Path, tmp_path: Path) -> None:
    """It divides the weights by one: what several GPUs do can be tried on one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for name in ("trajectory, packed", "LoRA"):
            expected, _ = stepped(CASES[name], model, Ranks())
            ranks = Ranks(divided=True)
            found, _ = stepped(CASES[name], model, ranks)
            assert difference(found, expected) < MOST_DIFFERENCE
        run = continued(model, tmp_path, ranks, STEPS)
        run.keep()
        assert isinstance(next(iter(run.learner.policy.trained.values())), DTensor)
    finally:
        dist.destroy_process_group()
    straight = trained(model, tmp_path / "straight", STEPS + 1)
    assert difference(trained(model, tmp_path, 1), straight) < MOST_DIFFERENCE


def test_two_ranks_save_the_whole_model(by_two: Path, model: Path) -> None:
    """Also after somebody who walked over its tensors gave up."""
    one = Policy(str(model), dtype=torch.bfloat16)
    tensors = dict(one.tensors())
    saved = load_file(by_two / "saved" / "whole" / "model.safetensors")
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[name], value) for name, value in tensors.items())
    found = torch.load(by_two / "whole-logprobs.pt")
    assert found == pytest.approx(one.prompt_logprobs(TOKENS), abs=0.3)


def test_two_ranks_save_a_lora(by_two: Path, model: Path) -> None:
    expected = learner(CASES["LoRA"], model, Ranks()).policy
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = PeftModel.from_pretrained(base, by_two / "saved" / "lora")(
            torch.tensor([TOKENS])
        ).logits
    found = token_logprobs(logits[:, :-1], torch.tensor([TOKENS[1:]]))[0].tolist()
    assert found == pytest.approx(expected.prompt_logprobs(TOKENS), abs=1e-5)
    assert torch.load(by_two / "lora-logprobs.pt") == pytest.approx(found, abs=1e-5)


def test_a_checkpoint_of_one_process_is_continued_by_two(
    by_two: Path, straight: dict[str, Any]
) -> None:
    assert difference(torch.load(by_two / "one.pt"), straight) < MOST_DIFFERENCE


def test_a_checkpoint_of_two_ranks_is_continued_by_one_process(
    by_two: Path, model: Path, straight: dict[str, Any]
) -> None:
    found = trained(model, by_two / "two", STEPS)
    assert difference(found, straight) < MOST_DIFFERENCE
