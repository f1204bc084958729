"""Every reward function of the trl package, unchanged, on rows and through a whole run."""

import json
from pathlib import Path
from typing import Any

from trl import rewards as trl

import envserver
from envserver import Result, Score, from_rows

ROW = {"problem": "What is a half?", "solution": r"$\frac{1}{2}$"}
RIGHT = r"<think>easy</think> It is \boxed{\frac{1}{2}}"
SETTINGS: dict[str, Any] = {"prompt": "problem"}
SETTINGS |= {"demonstration": RIGHT.replace("{", "{{").replace("}", "}}")}
LENGTH = """
def length(completion_ids, **_):
    return [len(completion_ids[0])]
"""


def reward(function: Any, said: str, ids: list[int] | None = None) -> float | None:
    """Returns the reward through the environment; it equals that of a bare call."""
    made = from_rows([ROW], reward=function, reward_range=[-1, 1], **SETTINGS)()
    made.prepare_scoring()
    (task,) = made.tasks("train")
    score = made.score(task, Result(output=said, completion_ids=ids))
    assert isinstance(score, Score)
    bare = function(
        completions=[[{"role": "assistant", "content": said}]],
        completion_ids=[ids],
        solution=[ROW["solution"]],
    )
    assert score.reward == bare[0]
    return score.reward


def test_each_gives_what_it_gives_in_trl() -> None:
    for function in (trl.accuracy_reward, trl.reasoning_accuracy_reward, trl.think_format_reward):
        assert reward(function, RIGHT) == 1.0
        assert reward(function, "None.") == 0.0
    punishment = trl.get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    assert reward(punishment, RIGHT, [1] * 90) == -0.5
    assert reward(trl.get_repetition_penalty_reward(ngram_size=2), RIGHT, [5] * 5) == -0.75
    assert reward(trl.get_cosine_scaled_reward(max_len=100), RIGHT, [1] * 50) == 0.75


def test_an_unreadable_gold_is_not_scored() -> None:
    row = {**ROW, "solution": "no formula"}
    made = from_rows([row], reward=trl.accuracy_reward, **SETTINGS)()
    (task,) = made.tasks("train")
    score = made.score(task, Result(output=RIGHT))
    assert isinstance(score, Score) and score.reward is None


def test_a_run_names_functions_and_gives_them_the_sampled_tokens(tmp_path: Path) -> None:
    rows = tmp_path / "halves.jsonl"
    rows.write_text(json.dumps(ROW) + "\n")
    (tmp_path / "lengths.py").write_text(LENGTH)
    result = envserver.process(
        rows,
        model="sim",
        sim={"solve_probability": 1, "openers": False},
        env={
            **SETTINGS,
            "group_size": 2,
            "reward": ["trl.rewards:accuracy_reward", f"{tmp_path}/lengths.py:length=0.001"],
            "reward_range": [0, 10],
        },
    )
    (group,) = result.groups
    for trajectory in group.trajectories:
        assert trajectory.score.components["accuracy_reward"] == 1.0
        sampled = sum(int(sequence.mask.sum()) for sequence in trajectory.sequences)
        assert trajectory.score.components["length"] == sampled > 5
