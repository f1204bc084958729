"""TRL's own trainers learn from a server, on a CPU: real GRPOTrainer, real AsyncGRPOTrainer."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from envserver_clients.adapters.trainers_engines import Versions
from envserver_clients.adapters.trl_environments import (
    TrlEnvironment,
    dataset_rows,
    math_environment,
)
from envserver_tools.calling import ToolError
from support.foreign_trainers import SUPPORT, house, random_model, trainer
from support.waiting import PATIENCE

from envserver import InputError

LETTERS = SUPPORT / "letters.py"
ROUNDING = 1e-3


def trained(
    python: Path,
    model: Path,
    folder: Path,
    urls: tuple[str, str],
    *words: object,
    script: str = "trl_trainers.py",
) -> str:
    """Runs one of TRL's trainers to its end; what it printed."""
    with trainer(script, python, model, folder, urls, *words) as process:
        assert process.end() == 0, process.output()[-5000:]
    return process.output()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def babbler(learn_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    return random_model(learn_python, tmp_path_factory.mktemp("babbler") / "model")


LETTER_WORDS = ("--env", LETTERS, "--env.group_size", 4, "--sampling.max_tokens", 24)


def test_the_grpo_trainer_takes_exact_rollouts_and_brings_its_weights_to_the_engine(
    learn_python: Path, babbler: Path, tmp_path: Path
) -> None:
    asked = ("--environment", "letters", "--grpo", 2)
    with house(learn_python, babbler, tmp_path, *LETTER_WORDS) as urls:
        trained(learn_python, babbler, tmp_path, urls, *asked)
    made = lines(tmp_path / "out/grpo.jsonl")
    assert [line["step"] for line in made] == [0, 1]
    for line in made:
        assert line["farthest"] < ROUNDING  # the engine has the trainer's weights of this step
        assert set(line["versions"]) == {line["step"]}
        assert line["prompts"][::4] == line["prompts"][3::4]
        assert len(set(line["rewards"])) > 1
        assert not all(line["truncated"])
        for mask, truncated in zip(line["masks"], line["truncated"], strict=True):
            assert not any(mask) if truncated else 0 in mask and mask[0] == mask[-1] == 1


@pytest.mark.slow
def test_the_asynchronous_trainer_leases_rollouts_and_brings_its_weights_to_the_engine(
    learn_python: Path, babbler: Path, tmp_path: Path
) -> None:
    asked = ("--environment", "letters", "--asynchronous", 3)
    with house(learn_python, babbler, tmp_path, *LETTER_WORDS) as urls:
        trained(learn_python, babbler, tmp_path, urls, *asked)
        status = httpx.get(f"{urls[0]}/v1/status", timeout=PATIENCE).json()
        held = httpx.get(f"{urls[0]}/v1/runs/trl-async/checkpoints", timeout=PATIENCE).json()[
            "checkpoints"
        ]
    taken = lines(tmp_path / "out/async.jsonl")
    assert len(taken) >= 3 * 8
    assert all(0 <= line["trainer_version"] - line["version"] <= 4 for line in taken)
    assert next(line["farthest"] for line in taken if "farthest" in line) < ROUNDING
    for number in {line["group"] for line in taken}:
        group = [line for line in taken if line["group"] == number]
        if len(group) == 4:
            best = max(group, key=lambda line: float(line["reward"]))
            assert best["advantage"] == max(line["advantage"] for line in group)
            assert abs(sum(line["advantage"] for line in group)) < ROUNDING
    assert all(line["prompt"][-1]["role"] == "user" for line in taken)
    assert all(line["completion"][0]["role"] == "assistant" for line in taken)
    assert [one["name"] for one in held] == ["step-3"]
    assert status["groups"]["leased"] == 0  # what was taken is acknowledged, the rest given back
    assert status["groups"]["acked"] > 0


@pytest.mark.slow
def test_the_asynchronous_trainer_learns_two_players_each_against_itself(
    learn_python: Path, babbler: Path, tmp_path: Path
) -> None:
    asked = ("--environment", "duel", "--asynchronous", 1)
    words = ("--env", SUPPORT / "duel.py", "--env.group_size", 4, "--sampling.max_tokens", 16)
    with house(learn_python, babbler, tmp_path, *words) as urls:
        trained(learn_python, babbler, tmp_path, urls, *asked)
    by_player: dict[tuple[int, str], dict[float, float]] = {}
    for line in lines(tmp_path / "out/async.jsonl"):
        player = line["prompt"][-1]["content"].partition("You are ")[2].partition(",")[0]
        by_player.setdefault((line["group"], player), {})[line["reward"]] = line["advantage"]
    assert {player for _, player in by_player} == {"one", "two"}
    for told in by_player.values():
        # Within a player of a group, more reward is more advantage.
        assert sorted(told) == sorted(told, key=lambda reward: told[reward])


def recipe(
    python: Path, model: Path, folder: Path, which: str, *words: object, more: tuple[object, ...]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Two steps of the documentation's recipe with two players of two turns: the server's status,
    the engine's models."""
    asked = (which, "--environment", "duel", "--steps", 2, "--batch", 8, "--group", 4)
    served = ("--env", SUPPORT / "duel.py", "--env.group_size", 4, "--sampling.max_tokens", 16)
    with house(*(python, model, folder, *served, *more), engine_words=("--enable-lora",)) as urls:
        program = (*asked, "--cpu", "--rate", 1e-3, *words)
        output = trained(python, model, folder, urls, *program, script="trl_recipe.py")
        models = httpx.get(f"{urls[1]}/v1/models", timeout=PATIENCE).json()["data"]
        losses = re.findall(r"'loss': '?(-?[\d.e-]+)", output)
        assert len(losses) == 2 and len(set(losses)) == 2, losses
        return httpx.get(f"{urls[0]}/v1/status", timeout=PATIENCE).json(), models


@pytest.mark.slow
def test_trls_trainer_gives_a_lora_of_one_agent_to_the_engine(
    learn_python: Path, babbler: Path, tmp_path: Path
) -> None:
    more, words = ("--openai.model_name", "policy@{version}"), ("grpo", "--agent", "two")
    status, models = recipe(learn_python, babbler, tmp_path, *words, more=more)
    assert status["policy_version"] == 1  # the weights after step 1 sampled step 2
    assert {"policy@0", "policy@1"} <= {one["id"] for one in models}


@pytest.mark.slow
def test_trls_asynchronous_trainer_trains_a_lora_of_both_agents(
    learn_python: Path, babbler: Path, tmp_path: Path
) -> None:
    more = ("--rollouts.max_queued_groups", 4)
    status, _ = recipe(learn_python, babbler, tmp_path, "async", more=more)
    assert status["policy_version"] >= 2
    assert status["groups"]["acked"] > 0


@pytest.mark.slow
def test_trls_loop_plays_our_environment(learn_python: Path, babbler: Path, tmp_path: Path) -> None:
    nowhere = ("http://127.0.0.1:9", "http://127.0.0.1:9")
    asked = ("--environment", "math", "--seats", 1)
    assert "rewards/MathSeat/mean" in trained(learn_python, babbler, tmp_path, nowhere, *asked)


# Pure parts


def test_a_trainer_that_begins_again_counts_on() -> None:
    first = Versions(-1)
    assert [first.of(0), first.of(1)] == [0, 1]
    again = Versions(50)
    assert [again.of(40), again.of(41)] == [51, 52]


def test_a_seat_plays_a_task_with_tools_and_is_scored() -> None:
    seats = math_environment(data_set="arithmetic", limit=3)
    row = dataset_rows(seats)[0]
    seat: Any = seats()
    assert isinstance(seat, TrlEnvironment)
    assert seat.reset(**row).startswith("What is")
    assert seat.calculate(expression="2*3") == "6"
    assert seat.get_reward() == 0.0
    with pytest.raises(ToolError):
        seat.finish(answer=3)
    seat.finish(answer=str(seats.tasks[row["task_id"]].hidden["answer"]))
    assert seat.get_reward() == 1.0
    seat.reset(**row)
    assert seat.get_reward() == 0.0
    assert "Args:\n    answer: answer" in str(seats.__dict__["finish"].__doc__)
    with pytest.raises(InputError, match="no task"):
        seat.reset(task_id="nowhere")
