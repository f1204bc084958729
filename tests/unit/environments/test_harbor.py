"""Task folders of Harbor: read, played in the sandbox, and judged by their own tests."""

from __future__ import annotations

import base64
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.swe.trees import Entry, tar_of
from envserver_integrations.harbor.env import harbor_environment
from envserver_integrations.harbor.grading import LOGS, changed, grade, read_task
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import cases_of
from support.extent import examples

import envserver
from envserver import ExecResult, InputError, SandboxSpec

CASES = cases_of(__file__)
PASSES, SOLVES = CASES["passes"], CASES["solves"]


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def task(folder: Path, test: str = PASSES, solve: str = SOLVES, **more: str) -> Path:
    (folder / "environment/data").mkdir(parents=True)
    (folder / "environment/data/note.txt").write_text("note")
    (folder / "environment/data/old.txt").write_text("old")
    toml = '[verifier]\ntimeout_sec = 30.0\nenv = { WANTED = "6" }\n[environment]\ncpus = 1\n'
    files = {
        "task.toml": toml,
        "instruction.md": "Write the sum of /app/numbers.txt into /app/total.txt.",
        "environment/Dockerfile": CASES["dockerfile"],
        "environment/numbers.txt": "1\n2\n3\n",
        "tests/test.sh": test.replace("old.txt", "data/old.txt"),
        "tests/extra/expected.txt": "6",
        "solution/solve.sh": solve,
    }
    return write(folder, **{**files, **more})


def play(path: object, **settings: Any) -> dict[str, Any]:
    """The trajectories of a model that is right, by task."""
    made = envserver.process(
        f"harbor:{path}",
        model="sim",
        env={"group_size": 1, "images": False},
        sim={"solve_probability": 1.0, "openers": False, "latency_seconds": 0},
        rollouts={"max_attempts": 1},
        workers={"processes": 1},
        **settings,
    )
    return {group.task_id: group.trajectories[0] for group in made.groups}


@pytest.mark.thorough
def test_tasks_are_played_in_the_sandbox_and_judged_by_their_tests(tmp_path: Path) -> None:
    task(tmp_path / "missing", test="exit 3")
    task(tmp_path / "named", test='echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json')
    task(tmp_path / "solved")
    tests_links = "if [ -x way_out ] && [ -f second.txt ]; then\n  " + PASSES + "fi"
    task(tmp_path / "untidy", test=tests_links, solve=CASES["untidy"] + SOLVES)
    task(tmp_path / "wrong", solve=SOLVES.replace("print sum", "print sum + 1"))
    played = play(tmp_path)
    # A reward that was not written is a failure of ours, not 0; planted ones do not count.
    rewards = {"named": 0.5, "solved": 1.0, "untidy": 1.0, "wrong": 0.0}
    assert {name: one.score.reward for name, one in played.items()} == rewards
    assert played["named"].score.components == {"a": 1.0, "b": 0.0}
    solved = played["solved"]
    assert "/work/numbers.txt" in solved.messages[1]["content"]
    seen = next(one["content"] for one in solved.messages if one["role"] == "tool")
    assert "test.sh" not in seen  # they come after the agent
    assert solved.output["deleted"] == ["data/old.txt"]


@pytest.mark.thorough
def test_a_full_disk_is_the_agents_fault(tmp_path: Path) -> None:
    task(tmp_path / "full", solve="seq 1 50000 | xargs touch")
    (trajectory,) = play(tmp_path).values()
    assert trajectory.score.reward == 0.0 and "too_large" in trajectory.output


@pytest.mark.thorough
def test_another_program_solves_a_task(tmp_path: Path) -> None:
    test = PASSES.replace('&& [ "$GREETING" = hello ] && [ -f "$PLACE/note.txt" ]', "")
    write(task(tmp_path / "tasks/sum", test=test), **{"../../agent/agent.py": CASES["agent"]})
    agent = {"command": "python3 {folder}/agent.py", "folder": tmp_path / "agent"}
    (trajectory,) = play(tmp_path / "tasks", agent=agent).values()
    assert (trajectory.score.reward, trajectory.flags) == (1.0, ["foreign_agent"])


class Written:
    """Sandboxes in which the tests have written these files."""

    isolation = "none"

    def __init__(self, **files: str) -> None:
        self._files = {f"{LOGS}/verifier/reward.{name}": text for name, text in files.items()}

    @asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[Written]:
        yield self

    async def exec(self, argv: list[str]) -> ExecResult:
        return ExecResult(exit=3, stderr=b"No such tool.")

    async def read(self, path: str, max_bytes: int) -> bytes:
        if path not in self._files:
            raise InputError("There is no such file.")
        return self._files[path].encode()


@pytest.mark.parametrize(("files", "reward", "parts"), CASES["rewards"])
async def test_rewards_are_read_in_every_form_and_never_guessed(
    files: dict[str, str], reward: float | str, parts: dict[str, float]
) -> None:
    score = await grade({}, {}, Written(**files), SandboxSpec())  # type: ignore[arg-type]
    if isinstance(reward, str):
        assert score.reward is None and reward in str(score.error)
    else:
        assert (score.reward, {**score.components, **score.metrics}) == (reward, parts)


changes = st.dictionaries(
    st.sampled_from(["a", "b/c", "b/d", "e"]), st.binary(max_size=20) | st.none(), max_size=4
)


@settings(max_examples=examples(20))
@given(changes, changes)
def test_what_changed_makes_the_workspace_again(before: Any, after: Any) -> None:
    base = {path: Entry(data or b"") for path, data in before.items()}
    new = {path: Entry(data) for path, data in after.items() if data is not None}
    gone = [path for path, data in after.items() if data is None and path in base]
    packed = gzip.compress(tar_of({**new, "../outside": Entry(b"x"), ".harbor/x": Entry(b"x")}))
    output = {"deleted": gone, "changed": [base64.b64encode(packed).decode()]}
    kept = {path: entry for path, entry in base.items() if path not in gone}
    assert changed(base, output) == {**kept, **new}
    no_workspaces: tuple[Any, ...] = (
        None, "x", {}, {"changed": "x"}, {"changed": [1]}, {"changed": ["eA=="]}, {"too_large": 9},
    )  # fmt: skip
    assert [changed({}, output) for output in no_workspaces] == [None] * len(no_workspaces)


def test_tasks_that_cannot_be_run_here_are_named(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    bad = task(tasks / "bad")
    environment = harbor_environment(tasks)
    docker = "environment/Dockerfile"
    for name, text, complaint in (
        (docker, "FROM x\nRUN make", "needs an image: its Dockerfile has RUN"),
        (docker, "FROM x\nCOPY a /etc/a", "copies to /etc/a"),
        (docker, "FROM x\nCOPY ../../../secret .", "copies ../../../secret"),
        (docker, "FROM x\nCOPY [1", "Dockerfile of bad cannot be read"),
        ("tests/test.sh", "apt-get update", r"its tests need a network \(apt-get\)"),
        ("task.toml", '[verifier]\nenvironment_mode = "separate"', "another container"),
        ("task.toml", "[", "not a readable task"),
    ):
        before = (bad / name).read_text()
        (bad / name).write_text(text)
        with pytest.raises(envserver.ConfigError, match=complaint):
            next(environment(environment.Config(images=False)).tasks("train"))
        (bad / name).write_text(before)
    (bad / "task.toml").write_text("[")
    assert read_task(task(tasks / "good")).needs_image == ""
    (only,) = environment(environment.Config(images=False)).tasks("train")
    assert only.id == "good" and "test.sh" not in str(only.public)


def test_images_are_named_by_tasks_or_by_a_template(tmp_path: Path) -> None:
    named = '[environment]\ndocker_image = "registry/sum:1"'
    task(tmp_path / "tasks/sum", **{"task.toml": named})
    task(tmp_path / "tasks/other")
    environment = harbor_environment(tmp_path / "tasks")
    (only,) = environment().tasks("train")
    assert only.public["image"] == "registry/sum:1"
    both = environment(environment.Config(image_name="tb/{name}")).tasks("train")
    assert [one.public["image"] for one in both] == ["tb/other", "registry/sum:1"]


def test_nothing_outside_of_a_task_is_read(tmp_path: Path) -> None:
    folder = task(tmp_path / "tasks/one")
    (tmp_path / "secret").write_text("secret")
    (folder / "environment/data/inside").symlink_to("note.txt")
    assert read_task(folder).tree["data/inside"].data == b"note"
    (folder / "environment/data/link").symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match="data/link leads out"):
        read_task(folder)
    without_tests = write(tmp_path / "one", **{"task.toml": "", "instruction.md": "Do."})
    with pytest.raises(InputError, match=r"has no tests/test\.sh"):
        read_task(without_tests)
