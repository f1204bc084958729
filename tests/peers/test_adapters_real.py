"""verl and SkyRL themselves take what the adapters give, and compute as we do (`make trainers`)."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from envserver_local.simulated import ASSETS
from envserver_records.experts import experts_from
from envserver_records.records import Score, Sequence, Trajectory, pack
from msgspec.structs import replace
from support.foreign_trainers import ROOT, SUPPORT, alone
from support.foreign_trainers import told as json_of
from support.objectives_table import Differences, against_verl
from support.trajectories import sequence, trajectory


def rollouts() -> list[Trajectory]:
    """Two of each of two tasks: one turn, several, a forked history, one that was cut off."""
    one_turn = trajectory("a", sequence([1, 2, 3], [0, 1, 1]), task_id="t1")
    turns = trajectory(
        "b", sequence([1, 2, 9, 9, 4], [0, 1, 0, 0, 1]), task_id="t1", score=Score(reward=0.0)
    )
    forked = trajectory(
        *("c", sequence([1, 2], [0, 1]), sequence([1, 2, 7, 8, 6], [0, 0, 0, 1, 1], 4)),
        task_id="t2",
        score=Score(reward=1.0),
    )
    cut = trajectory("d", sequence([5, 6, 7], [0, 0, 1]), task_id="t2", truncated=True)
    made = [one_turn, turns, forked, cut]
    for one in made:
        one.sequences = [routed(row) for row in one.sequences]
    return made


def routed(row: Sequence) -> Sequence:
    """Each token goes to the experts of its own number."""
    table = np.repeat(row.tokens[:-1].astype(np.uint8), 4).reshape(-1, 2, 2)
    return replace(row, experts=experts_from(table))


@pytest.fixture(scope="module")
def told(trainers_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What both made of them, in one process."""
    folder = tmp_path_factory.mktemp("trainers")
    (folder / "rollouts").write_bytes(pack(rollouts()))
    shutil.copytree(ASSETS, folder / "tokenizer")
    environ = alone(ROOT / "clients", ROOT / "tools")
    command = (trainers_python, "-W", "ignore", SUPPORT / "trainers_peer.py", folder)
    return dict(json_of(*command, env=environ, folder=folder))


def experts_of(table: list[Any]) -> list[int]:
    """The expert of each token, which is the same in all layers."""
    (experts,) = {tuple(column) for column in np.array(table).reshape(len(table), -1).T.tolist()}
    return list(experts)


def test_verl_pads_and_scores_its_rows(told: dict[str, Any]) -> None:
    batch = told["verl"]
    assert [row[-1:] for row in batch["prompts"]] == [[1], [1], [7], [6]]
    assert [row[:4] for row in batch["responses"]][1] == [2, 9, 9, 4]
    masks = [row[:4] for row in batch["response_mask"]]
    assert masks == [[1, 1, 0, 0], [1, 0, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert batch["rollout_log_probs"][1][:5] == [-0.25, 0.0, 0.0, -0.625, 0.0]
    for mask, logprobs in zip(batch["response_mask"], batch["rollout_log_probs"], strict=True):
        assert all(trained or one == 0.0 for one, trained in zip(logprobs, mask, strict=True))
    ends = [row.index(score) if (score := sum(row)) else None for row in batch["rm_scores"]]
    assert ends == [1, None, 1, 0]
    assert [sum(row) for row in batch["rm_scores"]] == [0.5, 0.0, 1.0, 0.5]
    assert batch["versions"] == [3, 3, 4, 3]
    assert experts_of(batch["routed_experts"][1]) == [*[0] * 7, 1, 2, 9, 9, *[0] * 13]
    assert batch["turn_scores"] == [[], [], [], []]
    assert batch["for_a_queue"] == [0.25, 0.0, 0.0, 0.75]
    assert "token_rewards" not in batch["names_for_a_queue"]


def test_skyrl_checks_joins_and_merges_them(told: dict[str, Any]) -> None:
    skyrl = told["skyrl"]
    assert skyrl["uids"] == ["uid-t1", "uid-t1", "uid-t2", "uid-t2"]
    rows, steps = skyrl["rows"], skyrl["steps"]
    assert rows["response_ids"] == [[2, 3], [2, 9, 9, 4], [8, 6], [7]]
    assert rows["loss_masks"] == [[1, 1], [1, 0, 0, 1], [1, 1], [0]]
    assert rows["rewards"] == [0.5, 0.0, 1.0, 0.5]
    assert steps["response_ids"] == [[2, 3], [2, 9, 9, 4], [2], [8, 6], [7]]
    assert steps["rewards"] == [[0, 0.5], [0, 0, 0, 0], [0], [0, 1.0], [0.5]]
    assert (rows["together"], steps["together"]) == (8, 10)
    padded = [[0, 0, 1, 2, 0], [1, 2, 9, 9, 0], [1, 2, 7, 8, 0], [0, 0, 5, 6, 0]]
    assert [experts_of(row) for row in rows["experts"]] == padded
    # The first row of the forked one, and what its second was given beyond that, are one sequence.
    assert skyrl["merged"][2] == [2, 7, 8, 6]
    assert (skyrl["metrics"]["avg_score"], skyrl["metrics"]["pass_at_n"]) == (0.5, 1.0)


def test_both_tell_a_server_when_the_weights_of_their_engines_change(told: dict[str, Any]) -> None:
    published = ["publish", ["10.0.0.7:4711"], 3]
    assert told["hooks"]["verl"] == ["pause", "sleep", "pause", "update", published]
    published = ["publish", ["http://10.0.0.7:4711"], 1]
    assert told["hooks"]["skyrl"] == ["pause", "/pause", "/resume", published, "pause", "/sleep"]


# The objectives are verl's own, and the README's table has every comparison


MOST_DIFFERENCE = 5e-6
GDPO = 1e-4
"""We add 1e-4 to a standard deviation, as TRL does; verl adds 1e-6."""


@pytest.fixture(scope="module")
def verl(trainers_python: Path) -> Differences:
    return against_verl(trainers_python)


def test_gradients_and_advantages_are_those_of_verl(verl: Differences) -> None:
    bounds = {"gdpo, advantages": GDPO}
    assert {n: v for n, v in verl.items() if not v < bounds.get(n, MOST_DIFFERENCE)} == {}


def test_skyrl_computes_our_logprobs_of_rows_with_images(
    trainers_python: Path, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    words = (trainers_python, "-W", "ignore", "-m", "support.skyrl_images", tmp_path / "model")
    environ = alone(ROOT / "clients", ROOT / "tools", ROOT / "tests")
    found = json_of(*words, env=environ, seconds=None)
    tell(f"SkyRL's logprobs of rows with images are within {found['difference']:.1e} of ours")
    assert found["difference"] < 1e-5
    assert "needs pixels" in found["refused"][0]
