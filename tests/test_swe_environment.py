"""`swe` as a whole: agents, rows of public data sets, the command, workers that are killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.commands import envserver, read_jsonl

from environments.swe.agent import AgentKind, solve
from environments.swe.cheats import result_of
from environments.swe.env import Swe
from environments.swe.patches import apply_changes, read_patch
from environments.swe.rules import Rules
from environments.swe.sample import sample_tasks
from environments.swe.trees import tree_of
from envserver import ConfigError, InputError, PublicTask, Reply, Sandboxes, SandboxSpec, Task
from envserver.cli.runtime import machinery
from envserver.config import SandboxConfig, Settings
from envserver.records import Group
from envserver.rollouts.group import Ticket, make_group
from envserver.sandbox.service import SandboxService
from envserver.sandbox.watched import WatchedSandboxes
from envserver.tokens.flags import chosen

SIM = ("--model", "sim", "--sim.latency_seconds", 0)
ROMAN = next(task for task in sample_tasks() if task.name == "roman-subtractive")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def rooms() -> AsyncIterator[Sandboxes]:
    """As the server has them: `tasks` opens them in an event loop of its own."""
    async with SandboxService(SandboxConfig()) as service:
        yield WatchedSandboxes(service.address)


class Scripted:
    """A `run` whose model says what a script says, again and again at its end."""

    def __init__(self, rooms: Sandboxes, script: list[Any], max_turns: int = 12) -> None:
        self.max_turns = max_turns
        self.asked: list[list[dict[str, Any]]] = []
        self.metrics: dict[str, float] = {}
        self._rooms, self._script = rooms, script

    def open_sandbox(self, spec: SandboxSpec) -> Any:
        return self._rooms.open(spec)

    def log_action(self, tool: str, input: Any = None, output: Any = None) -> None: ...

    def log_metric(self, name: str, value: float) -> None:
        self.metrics[name] = value

    async def chat(self, messages: list[dict[str, Any]], **_: Any) -> Reply:
        self.asked.append([dict(message) for message in messages])
        said = self._script[min(len(self.asked), len(self._script)) - 1]
        message = said if isinstance(said, dict) else {"role": "assistant", "content": said}
        calls = message.get("tool_calls") or []
        reason = "tool_calls" if calls else "stop"
        return Reply(message["content"], calls, reason, message)

    @property
    def answers(self) -> list[str]:
        """What the model was told after each of its messages but the last."""
        return [asked[-1]["content"] for asked in self.asked[1:]]


async def attempt(
    rooms: Sandboxes, kind: AgentKind, *script: Any, **public: Any
) -> tuple[dict[str, Any], Scripted]:
    run = Scripted(rooms, list(script))
    task = PublicTask("t", public or ROMAN.task().public)
    return await solve(task, run, kind, Rules()), run  # type: ignore[arg-type]


def bash(command: str) -> str:
    return f"I do this.\n```bash\n{command}\n```"


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    calls = [{"id": "c", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


SUBMIT = bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


@pytest.mark.parametrize("kind", ["bash", "tools", "text"])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_scripted_agent_with_the_gold_patch_solves_all(
    rooms: Sandboxes, kind: AgentKind
) -> None:
    swe = Swe(Swe.Config(agent=kind))
    swe.sandboxes = rooms

    async def reward(task: Task) -> float | None:
        run = Scripted(rooms, [*swe.demonstration(task), "Done."], max_turns=40)
        output = await swe.rollout(task.without_hidden(), run)  # type: ignore[arg-type]
        result = result_of("")
        result.output = output
        return (await swe.score(task, result)).reward

    rewards = [await reward(task) for task in swe.tasks("train")]
    assert rewards == [1.0] * 20


@pytest.mark.asyncio(loop_scope="module")
async def test_bash_shows_heads_and_tails_and_takes_the_files(rooms: Sandboxes) -> None:
    output, run = await attempt(
        rooms,
        "bash",
        bash("pwd; git status --short; git log --oneline | wc -l; ls"),
        bash("seq 1 30000; exit 3"),
        bash(
            "sed -i 's/6/7/' roman.py; echo new > added.txt; mkdir __pycache__;"
            "touch __pycache__/x.pyc"
        ),
        bash("git commit -qam mine; rm -rf .git/hooks; git config core.fsmonitor 'touch owned'"),
        SUBMIT,
    )
    first, second, *_ = run.answers
    assert first.split() == ["[exit", "status", "0]", "/work", "1", "roman.py", "tests"]
    assert "[exit status 3]" in second
    assert "\n30000" in second
    assert "cut: " in second
    assert len(second) < 12_000
    assert output["submitted"]
    changed = apply_changes(ROMAN.tree, read_patch(output["patch"]))
    assert set(changed) == {*ROMAN.files, "added.txt"}
    assert b"3999" in changed["roman.py"].data


@pytest.mark.asyncio(loop_scope="module")
async def test_bash_wants_one_block(rooms: Sandboxes) -> None:
    two = f"{bash('touch a')}\n{bash('touch b')}"
    output, run = await attempt(rooms, "bash", two, "no block", bash("ls"), two, two, two)
    assert [("exactly one block" in answer) for answer in run.answers] == [
        True, True, False, True, True
    ]  # fmt: skip
    assert "a\n" not in run.answers[2]
    assert (output["submitted"], output["patch"]) == (False, "")
    assert run.metrics == {"format_errors": 5.0, "submitted": 0.0}


@pytest.mark.asyncio(loop_scope="module")
async def test_bash_runs_no_thoughts(rooms: Sandboxes) -> None:
    thought = f"<think>Perhaps:\n{bash('touch a')}\n</think>{bash('ls')}"
    _, run = await attempt(rooms, "bash", thought, f"<think>{SUBMIT}", SUBMIT)
    assert run.answers[0].split() == ["[exit", "status", "0]", "roman.py", "tests"]
    assert "exactly one block" in run.answers[1]


@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_not_handed_in_is_no_patch(rooms: Sandboxes) -> None:
    output, run = await attempt(rooms, "bash", bash("echo x > y"))
    assert len(run.asked) == run.max_turns
    assert output == {"patch": "", "submitted": False, "reason": "nothing was handed in"}


@pytest.mark.asyncio(loop_scope="module")
async def test_the_word_counts_only_as_the_first_line(rooms: Sandboxes) -> None:
    word = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    output, _ = await attempt(
        rooms, "bash", bash(f"echo; echo x; echo {word}"), bash(f"echo {word}; exit 1"), word
    )
    assert not output["submitted"]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_repository_that_was_destroyed_is_told(rooms: Sandboxes) -> None:
    output, _ = await attempt(rooms, "bash", bash("rm -rf .git"), SUBMIT)
    assert (output["submitted"], output["patch"]) == (True, "")
    assert "repository" in output["reason"]
    fill = bash("for n in 1 2; do head -c 600000 /dev/zero | tr '\\0' x > big$n; done")
    output, _ = await attempt(rooms, "bash", fill, SUBMIT)
    assert output["patch"] == ""
    assert output["reason"]


@pytest.mark.asyncio(loop_scope="module")
async def test_tools(rooms: Sandboxes) -> None:
    output, run = await attempt(
        rooms,
        "tools",
        call("list_dir"),
        call("edit", path="roman.py", old='"""Roman numerals."""', new='"""Numerals."""'),
        call("write_file", path="../out", content="x"),
        call("fly"),
        call("submit"),
        call("list_dir"),
    )
    assert len(run.asked) == 5
    assert "roman.py" in run.answers[0]
    assert [answer.startswith("Error") for answer in run.answers] == [False, False, True, True]
    assert run.metrics == {"tool_errors": 2.0, "submitted": 1.0}
    assert '+"""Numerals."""' in output["patch"]


@pytest.mark.asyncio(loop_scope="module")
async def test_tools_end_with_words_or_too_many_errors(rooms: Sandboxes) -> None:
    output, run = await attempt(rooms, "tools", call("list_dir"), "I am done.")
    assert (output["submitted"], len(run.asked)) == (True, 2)
    output, run = await attempt(rooms, "tools", call("fly"))
    assert (output["submitted"], len(run.asked)) == (False, 10)


@pytest.mark.asyncio(loop_scope="module")
async def test_text(rooms: Sandboxes) -> None:
    write = {"tool": "write_file", "args": {"path": "a.txt", "content": "x\n"}}
    output, run = await attempt(
        rooms, "text", "THOUGHT: hm", f"TOOL_CALL: {json.dumps(write)}", "FINAL: I wrote it."
    )
    assert "+++ b/a.txt" in output["patch"]
    assert "write_file" in run.asked[0][0]["content"]
    output, _ = await attempt(rooms, "text", "TOOL_CALL: {")
    assert not output["submitted"]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_agent_never_sees_what_is_hidden(rooms: Sandboxes) -> None:
    """Neither in its prompt nor in its sandbox."""
    task = ROMAN.task()
    look = bash(
        "places='/work /tmp /home /root /etc /var /opt /srv'; python3 -c 'import environments';"
        "find $places -name 'roman-*' 2>/dev/null;"
        "grep -rls test_[s]ubtractive $places; echo looked"
    )
    _, run = await attempt(rooms, "bash", look, SUBMIT)
    lines = run.answers[0].splitlines()
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-2:] == ["ModuleNotFoundError: No module named 'environments'", "looked"]
    assert "test_subtractive" not in json.dumps([task.public, run.asked[0]])
    assert task.hidden["fail_to_pass"][0].endswith("test_subtractive")


# Rows of public data sets.


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """One repository with two commits: `double` is wrong in the first."""
    place = tmp_path / "mirror" / "acme__tool"
    place.mkdir(parents=True)

    def git(*arguments: str) -> str:
        names = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        command = ["git", "-C", str(place), *names, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    for number, body in enumerate(("x + 3", "x + x")):
        files = {
            "tool/__init__.py": "",
            "tool/core.py": f"def double(x):\n    return {body}\n\n\ndef one():\n    return 1\n",
            "tests/test_core.py": OLD_TESTS,
            "setup.py": "raise SystemExit('never run')\n",
        }
        for path, text in files.items():
            (place / path).parent.mkdir(exist_ok=True)
            (place / path).write_text(text)
        git("add", "-A")
        git("commit", "-qm", f"commit {number}")
    return tmp_path / "mirror"


FIX = (
    "diff --git a/tool/core.py b/tool/core.py\n--- a/tool/core.py\n+++ b/tool/core.py\n"
    "@@ -1,2 +1,2 @@\n def double(x):\n-    return x + 3\n+    return x + x\n"
)
BREAK = FIX.replace("-    return x + 3\n+    return x + x", "-    return x + x\n+    return x + 3")
TEST_PATCH = (
    "diff --git a/tests/test_core.py b/tests/test_core.py\n"
    "--- a/tests/test_core.py\n+++ b/tests/test_core.py\n@@ -1,4 +1,7 @@\n"
    "-from tool.core import one\n+from tool.core import double, one\n \n def test_one():\n"
    "     assert one() == 1\n+\n+def test_double():\n+    assert double(7) == 14\n"
)
OLD_TESTS = "from tool.core import one\n\ndef test_one():\n    assert one() == 1\n"
NEW_TESTS = """
from tool.core import double

class TestDouble:
    def test_seven(self):
        assert double(7) == 14
"""


def commits(mirror: Path) -> list[str]:
    command = ["git", "-C", str(mirror / "acme__tool"), "log", "--reverse", "--format=%H"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def bench_row(mirror: Path, **changes: Any) -> dict[str, Any]:
    return {
        "instance_id": "acme__tool-1", "repo": "acme/tool", "base_commit": commits(mirror)[0],
        "patch": FIX, "test_patch": TEST_PATCH, "problem_statement": "double(7) is 10.",
        "FAIL_TO_PASS": json.dumps(["tests/test_core.py::test_double"]),
        "PASS_TO_PASS": ["tests/test_core.py::test_one"], **changes,
    }  # fmt: skip


def smith_row(mirror: Path, **changes: Any) -> dict[str, Any]:
    return {
        "repo": f"swesmith/acme__tool.{commits(mirror)[0][:8]}", "image_name": "i",
        "patch": FIX, "problem_statement": "one() is 2",
        "FAIL_TO_PASS": ["tests/test_core.py::test_one"], "PASS_TO_PASS": [], **changes,
    }  # fmt: skip


def r2e_row(mirror: Path, **changes: Any) -> dict[str, Any]:
    content = {"test_file_names": ["test_1.py"], "test_file_codes": [NEW_TESTS]}
    return {
        "repo_name": "tool", "docker_image": "i", "commit_hash": commits(mirror)[1],
        "problem_statement": "[ISSUE] double(7) is 10 [/ISSUE]",
        "execution_result_content": json.dumps(content), "parsed_commit_content": "{}",
        "expected_output_json": json.dumps({"TestDouble.test_seven": "PASSED"}), **changes,
    }  # fmt: skip


def swe_of(rooms: Sandboxes, mirror: Path, **config: Any) -> Swe:
    swe = Swe(Swe.Config(mirror=mirror, **config))
    swe.sandboxes = rooms
    return swe


@pytest.mark.asyncio(loop_scope="module")
async def test_rows_of_swe_bench(rooms: Sandboxes, mirror: Path) -> None:
    swe = swe_of(rooms, mirror)
    task = swe.task_from_row(bench_row(mirror))
    scores = [await swe.score(task, result_of(patch)) for patch in (FIX, "", TEST_PATCH)]
    assert [score.reward for score in scores] == [1.0, 0.0, 0.0]
    assert set(task.public) == {"mirror", "commit", "problem"}
    look = bash("git log --oneline --all; cat tests/test_core.py")
    _, run = await attempt(rooms, "bash", look, SUBMIT, **task.public)
    assert "test_double" not in run.answers[0]
    assert run.answers[0].count("The repository") == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_rows_of_swe_smith(rooms: Sandboxes, mirror: Path) -> None:
    """The patch is the bug; the tests that show it are taken away from the agent."""
    bug = "diff --git a/tool/core.py b/tool/core.py\n--- a/tool/core.py\n+++ b/tool/core.py\n" + (
        "@@ -5,2 +5,2 @@\n def one():\n-    return 1\n+    return 2\n"
    )
    swe = swe_of(rooms, mirror)
    task = swe.task_from_row(smith_row(mirror, patch=bug))
    gold = task.hidden["patch"]
    assert "+    return 1" in gold
    scores = [await swe.score(task, result_of(patch)) for patch in (gold, "", bug)]
    assert [score.reward for score in scores] == [1.0, 0.0, 0.0]
    assert task.public["removed"] == ["tests/test_core.py"]


@pytest.mark.asyncio(loop_scope="module")
async def test_rows_of_r2e(rooms: Sandboxes, mirror: Path) -> None:
    swe = swe_of(rooms, mirror)
    task = swe.task_from_row(r2e_row(mirror))
    assert task.public["commit"] == commits(mirror)[0]
    scores = [await swe.score(task, result_of(patch)) for patch in (task.hidden["patch"], FIX, "")]
    assert [score.reward for score in scores] == [1.0, 1.0, 0.0]


@pytest.mark.asyncio(loop_scope="module")
async def test_rows_of_ones_own(rooms: Sandboxes, mirror: Path) -> None:
    tar = mirror / "repo.tar"
    source, commit = str(mirror / "acme__tool"), commits(mirror)[0]
    subprocess.run(["git", "-C", source, "archive", "-o", str(tar), commit], check=True)
    (mirror / "hidden" / "tests").mkdir(parents=True)
    (mirror / "hidden" / "tests" / "test_new.py").write_text(NEW_TESTS)
    row = bench_row(mirror, repo_archive="repo.tar", hidden_tests="hidden")
    row |= {"FAIL_TO_PASS": ["tests/test_new.py::TestDouble::test_seven"], "base_commit": ""}
    swe = swe_of(rooms, mirror)
    task = swe.task_from_row(row)
    scores = [await swe.score(task, result_of(patch)) for patch in (FIX, "", TEST_PATCH)]
    assert [score.reward for score in scores] == [1.0, 0.0, 0.0]
    with pytest.raises(InputError, match="archive"):
        swe.task_from_row(row | {"repo_archive": "gone.tar"})


@pytest.mark.asyncio(loop_scope="module")
async def test_rows_that_cannot_be_run_are_counted(
    rooms: Sandboxes, mirror: Path, tmp_path: Path
) -> None:
    rows = [
        bench_row(mirror),
        bench_row(mirror, repo="acme/other"),
        bench_row(mirror, base_commit="0" * 40),
        bench_row(mirror, base_commit="--upload-pack=x"),
        bench_row(mirror, patch=BREAK),
        bench_row(mirror, patch="diff --git a/x b/x\nBinary files a/x and b/x differ\n"),
        bench_row(mirror, FAIL_TO_PASS='["test_double (tests.TestCore)"]'),
        bench_row(mirror, FAIL_TO_PASS="[]"),
        bench_row(mirror, problem_statement=""),
        bench_row(mirror, FAIL_TO_PASS=["tests/test_core.py::test_x"]),
        r2e_row(mirror, expected_output_json="{}"),
        {"question": "2 + 2?", "problem_statement": "x"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "no json\n")
    swe = swe_of(rooms, mirror, data_set="swe_bench", data_path=path)
    tasks = list(swe.tasks("train"))
    assert [task.id for task in tasks] == ["swe_bench-0"]
    assert dict(swe.dropped) == {
        "Its repository is not in the mirror.": 1,
        "Its commit is not in the mirror.": 1,
        "Its commit is not named by an id.": 1,
        "Its gold patch cannot be applied (conflict).": 1,
        "Its gold patch cannot be applied (binary).": 1,
        "Its tests have no ids of pytest.": 1,
        "FAIL_TO_PASS is empty.": 1,
        "There is no problem statement.": 1,
        "the gold patch does not pass its tests": 1,
        "No test is expected to pass.": 1,
        "The row has none of the known shapes.": 1,
        "no JSON object": 1,
    }


@pytest.mark.asyncio(loop_scope="module")
async def test_without_a_mirror_it_says_so(tmp_path: Path, mirror: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(bench_row(mirror)) + "\n")
    with pytest.raises(ConfigError, match="mirror"):
        list(Swe(Swe.Config(data_set="swe_bench", data_path=path)).tasks("train"))
    with pytest.raises(InputError, match="mirror"):
        Swe().task_from_row(bench_row(mirror))


# As a whole.


def test_tasks_are_the_same_and_in_the_order_of_the_seed() -> None:
    first, again, other = (
        [task.id for task in Swe(Swe.Config(seed=seed)).tasks("train")] for seed in (1, 1, 2)
    )
    assert first == again != other
    assert sorted(first) == sorted(other)


def test_the_readmes_first_command(tmp_path: Path) -> None:
    words = "process --env swe --env.total_steps 4 --model sim --sim.solve_probability 0.5"
    ran = envserver(*words.split(), "--env.group_size", 6, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    groups = read_jsonl(tmp_path / "data" / "swe.jsonl")
    assert len(groups) == 4
    assert {score for group in groups for score in group["scores"]} == {0.0, 1.0}
    for group in groups:
        for rollout in group["envserver"]["rollouts"]:
            assert rollout["usage"]["sandbox"]["executions"] >= 3
    assert "test_subtractive" not in json.dumps([group["messages"] for group in groups])


async def under_fire(groups: int, group_size: int, pause: float) -> int:
    """Makes groups while workers are killed at random; how many were."""
    settings = Settings.model_validate(
        {
            "model": "sim",
            "sim": {"latency_seconds": 0.02},
            "rollouts": {"max_attempts": 60},
            "workers": {"processes": 3, "rollouts_per_process": 4},
            "sandbox": {"concurrent": 12},
        }
    )
    swe = Swe(Swe.Config(group_size=group_size))
    killed, rng = 0, random.Random(7)
    async with machinery(
        settings, swe, "swe", observer=lambda event: None, need_engine=True,
        actions=chosen([], [], []), need_exact=False, drop_zero_variance=False,
    ) as parts:  # fmt: skip
        tasks = list(swe.tasks("train"))
        tickets = [
            Ticket(group_id=f"g{n}", index=n, env="swe", split="train", seed=0, task=tasks[n % 20])
            for n in range(groups)
        ]
        limit = asyncio.Semaphore(3)

        async def make(ticket: Ticket) -> Any:
            async with limit:
                return await make_group(parts, ticket)

        making = asyncio.gather(*map(make, tickets))
        while not making.done():
            await asyncio.sleep(pause * rng.random())
            if pids := parts.pool.snapshot()["pids"]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rng.choice(pids), signal.SIGKILL)
                    killed += 1
        made = await making
    for group in made:
        assert isinstance(group, Group)
        assert len(group.trajectories) == group_size
        assert all(one.score.reward in (0.0, 1.0) for one in group.trajectories)
        assert {failure.kind for failure in group.failures} <= {"worker_died"}
    return killed


def descendants() -> dict[int, str]:
    """What runs on behalf of this process: by process id, how it was started."""
    found: dict[int, str] = {}
    waiting = [os.getpid()]
    while waiting:
        with contextlib.suppress(OSError):
            for listed in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
                for child in map(int, listed.read_text().split()):
                    found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
                    waiting.append(child)
    return found


async def nothing_left(before: dict[int, str]) -> None:
    for _ in range(100):
        # Python keeps these two for the next pool of this process.
        new = {
            pid: words
            for pid, words in descendants().items()
            if pid not in before and "multiprocessing" not in words
        }
        if not new:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(new)


@pytest.mark.asyncio(loop_scope="module")
async def test_workers_killed_at_random() -> None:
    before = descendants()
    assert await under_fire(groups=4, group_size=4, pause=1.5) >= 1
    await nothing_left(before)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_workers_killed_at_random_during_200_rollouts() -> None:
    before = descendants()
    assert await under_fire(groups=50, group_size=4, pause=1.0) >= 15
    await nothing_left(before)


def test_own_tasks_are_small_repositories() -> None:
    for task in sample_tasks():
        assert tree_of(task.files) == task.tree
        assert 2 <= len(task.files) <= 12
        assert len(task.problem) > 100
