"""`envserver rescore`: stored rollouts with new scores, the old ones kept, nothing lost."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from envserver_records.records import Usage
from hypothesis import given
from hypothesis import strategies as st
from support.commands import running

from envserver import Group, Score, Sequence, Trajectory, main
from envserver.export import group_line, group_of
from envserver.export.rescored import rescored_line

ECHO = '''
from envserver import Environment, Score, Task

class Echo(Environment):
    """Say the number."""

    def tasks(self, split):
        for n in range(3):
            yield Task(f"{split}-{self.config.seed}-{n}", {}, {"answer": str(n)})

    def rollout(self, task, run):
        raise AssertionError("nothing is run again")

    def score(self, task, result):
        return Score(reward=float(result.output == task.hidden["answer"]), metrics={"new": 1.0})
'''

RUBRIC = '''
from pathlib import Path
from envserver import Score

class Shy:
    """Half of the environment's; nothing for who says nothing; fails at a 2 until it is mended."""

    def __init__(self, environment):
        self.environment = environment

    async def score(self, task, result):
        if result.output == "2" and not Path(__file__).with_name("mended").exists():
            raise RuntimeError("the judge does not answer")
        if result.output == "":
            return Score(reward=None)
        return Score(reward=self.environment.score(task, result).reward / 2)
'''


def trajectory(number: int, output: str, reward: float, rows: int = 1) -> Trajectory:
    tokens = np.arange(3, dtype=np.int32) + number
    row = Sequence(
        tokens=tokens,
        mask=np.array([0, 1, 1], np.uint8),
        logprobs=np.array([0, -1, -2], np.float32),
        calls=np.array([-1, 0, 0], np.int32),
        versions=np.array([-1, 0, 0], np.int32),
        path=[0],
    )
    return Trajectory(
        rollout_id=f"r{number}",
        attempt=1,
        task_id="t",
        env="echo",
        sequences=[row] * rows,
        messages=[{"role": "user", "content": "?"}, {"role": "assistant", "content": output}],
        tools=[],
        output=output,
        score=Score(reward=reward, components={"old": reward}),
        finish_reason="stop",
        truncated=False,
        limit=None,
        turns=1,
        usage=Usage(completion_tokens=2),
    )


def line_of(task_id: str, *trajectories: Trajectory, env: str = "echo", **how: Any) -> bytes:
    group = Group(
        group_id=f"{env}-{task_id}",
        index=0,
        env=env,
        task_id=task_id,
        split="test",
        trajectories=list(trajectories),
        seed=7,
    )
    return group_line(group, include_messages=True, score_range=how.get("score_range", "unit"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("echo.py").write_text(ECHO)
    Path("rubric.py").write_text(RUBRIC)
    return tmp_path


def rescore(*words: str) -> int:
    common = ["--env", "echo.py", "--out", "new.jsonl", "--processes", "1"]
    return main(["rescore", "old.jsonl", *common, *words])


def rewards(path: str) -> dict[str, list[Any]]:
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return {
        line["envserver"]["task_id"]: [one["reward"] for one in line["envserver"]["rollouts"]]
        for line in lines
    }


def test_the_environment_scores_again_and_what_it_has_not_is_counted(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = line_of("test-7-0", trajectory(0, "0", 0.0, rows=2), trajectory(1, "9", 0.0))
    right = line_of("test-7-1", trajectory(2, "1", 1.0), score_range="pm1")
    gone = line_of("test-7-99", trajectory(3, "1", 1.0))
    other = line_of("x", trajectory(4, "1", 1.0), env="other")
    Path("old.jsonl").write_bytes(wrong + right + gone + other)
    assert rescore() == 0
    assert rewards("new.jsonl") == {"test-7-0": [1.0, 0.0], "test-7-1": [1.0]}
    said = capfd.readouterr().err
    assert "1 of 3 rewards changed (1 up, 0 down)" in said
    assert "test-7-99" in said
    assert "'other'" in said
    new, before = json.loads(Path("new.jsonl").read_bytes().splitlines()[0]), json.loads(wrong)
    assert new["scores"] == [1.0, 1.0, 0.0]
    assert (new["tokens"], new["messages"]) == (before["tokens"], before["messages"])
    first = new["envserver"]["rollouts"][0]
    assert first["rescored_from"] == {"reward": 0.0, "components": {"old": 0.0}, "metrics": {}}
    assert first["metrics"] == {"new": 1.0}
    assert group_of(new, "here").rollouts[0].reward == 1.0
    assert rescore() == 2  # it exists
    assert "--resume" in capfd.readouterr().err


def test_a_rubric_that_fails_gives_no_zero_and_is_asked_again(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fine = line_of("test-7-1", trajectory(0, "1", 1.0), trajectory(1, "", 0.0))
    fails = line_of("test-7-2", trajectory(2, "2", 1.0), trajectory(3, "1", 0.0))
    Path("old.jsonl").write_bytes(fine + fails)
    rubric = ("--rubric", "rubric.py:Shy")
    assert rescore(*rubric) == 1
    assert rewards("new.jsonl") == {"test-7-1": [0.5]}
    said = capfd.readouterr().err
    assert "the judge does not answer" in said
    assert "without a reward: 1 rollout" in said
    Path("mended").touch()
    with Path("new.jsonl").open("ab") as file:
        file.write(b'{"tokens"')  # what a killed writer leaves
    assert rescore(*rubric, "--resume") == 0
    assert rewards("new.jsonl") == {"test-7-1": [0.5], "test-7-2": [0.5, 0.0]}
    assert "1 of them from an earlier run" in capfd.readouterr().err


def test_overwrite_keeps_the_old_file_until_a_group_is_scored(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = line_of("test-7-0", trajectory(0, "0", 0.0))
    Path("old.jsonl").write_bytes(good)
    assert rescore() == 0
    before = Path("new.jsonl").read_bytes()

    Path("old.jsonl").write_bytes(b"not a group\n" + good)
    assert rescore("--overwrite") == 2
    Path("old.jsonl").write_bytes(line_of("test-7-2", trajectory(0, "2", 1.0)))
    assert rescore("--overwrite", "--rubric", "rubric.py") == 1
    assert "1 groups that could not be scored" in capsys.readouterr().err
    assert Path("new.jsonl").read_bytes() == before

    others = [line_of(f"test-7-{number}", trajectory(number, "1", 0.0)) for number in (1, 2, 0)]
    Path("old.jsonl").write_bytes(b"".join([*others, b"not a group\n"]))
    assert rescore("--overwrite") == 2
    written = Path("new.jsonl").read_bytes()
    Path("old.jsonl").write_bytes(b"".join(others))
    assert rescore("--resume") == 0
    assert Path("new.jsonl").read_bytes().startswith(written)
    assert list(rewards("new.jsonl")) == ["test-7-1", "test-7-2", "test-7-0"]
    names = {"echo.py", "rubric.py", "old.jsonl", "new.jsonl", "__pycache__"}
    assert {path.name for path in place.iterdir()} <= names


KILLER = """
import os, signal, time
from pathlib import Path
from echo import Echo as Base

class Echo(Base):
    def score(self, task, result):
        pid = Path(__file__).with_name("pid")
        while not pid.exists():
            time.sleep(0.01)
        os.kill(int(pid.read_text()), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)  # no score is returned, and nothing is left
"""


def test_a_killed_overwrite_leaves_the_old_file(place: Path) -> None:
    Path("old.jsonl").write_bytes(line_of("test-7-0", trajectory(0, "0", 0.0)))
    assert rescore() == 0
    before = Path("new.jsonl").read_bytes()
    Path("killer.py").write_text(KILLER)
    words = ("--env", "killer.py", "--out", "new.jsonl", "--overwrite")
    with running("rescore", "old.jsonl", *words, folder=place) as process:
        Path("pid.new").write_text(str(process.pid))
        Path("pid.new").rename("pid")
        assert process.end() == -signal.SIGKILL
    assert Path("new.jsonl").read_bytes() == before


def test_a_rubric_that_is_not_there_is_named(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("old.jsonl").write_bytes(line_of("test-7-1", trajectory(0, "1", 1.0)))
    assert rescore("--rubric", "rubric.py:Bold") == 2
    assert "Shy" in capfd.readouterr().err


@given(st.lists(st.tuples(st.integers(1, 3), st.none() | st.floats(0, 1)), min_size=1, max_size=5))
def test_rows_stay_with_their_rollouts(given: list[tuple[int, float | None]]) -> None:
    trajectories = [trajectory(10 * at, "x", 0.5, rows) for at, (rows, _) in enumerate(given)]
    line = json.loads(line_of("t", *trajectories, score_range="pm1"))
    scores = [Score(reward=reward) for _, reward in given]
    new = rescored_line(line, scores, by="test", at=0.0)
    kept = [(at, rows, reward) for at, (rows, reward) in enumerate(given) if reward is not None]
    if new is None:
        assert not kept
        return
    group = group_of(new, "here")  # checks that rows and rollouts belong together
    assert [(len(one.rows), one.reward) for one in group.rollouts] == [
        (rows, reward) for _, rows, reward in kept
    ]
    firsts = [one.rows[0].tokens.tolist() for one in group.rollouts]
    assert firsts == [[10 * at, 10 * at + 1, 10 * at + 2] for at, _, _ in kept]
    told = [2 * reward - 1 for _, rows, reward in kept for _ in range(rows)]
    assert new["scores"] == pytest.approx(told)
