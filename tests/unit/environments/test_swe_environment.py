"""`swe` as a whole: agents, the command, workers that are killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.swe.env import Swe
from envserver_environments.swe.patches import apply_changes, read_patch
from envserver_records.records import Group
from support.commands import envserver, read_jsonl
from support.scripted_run import call, calls
from support.swe_scripts import ROMAN, SUBMIT, answers, attempt, bash
from support.waiting import until

from envserver import Sandboxes, Settings
from envserver.rollouts import make_group
from envserver.rollouts.group import GroupRequest
from envserver.running import rollout_context


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
    first, second, *_ = answers(run)
    assert first.split() == ["[exit", "status", "0]", "/work", "1", "roman.py", "tests"]
    for part in ("[exit status 3]", "\n30000", "cut: "):
        assert part in second
    assert len(second) < 12_000
    assert output["submitted"]
    changed = apply_changes(ROMAN.tree, read_patch(output["patch"]))
    assert set(changed) == {*ROMAN.files, "added.txt"}
    assert b"3999" in changed["roman.py"].data


@pytest.mark.asyncio(loop_scope="module")
async def test_bash_wants_one_block_and_runs_no_thoughts(rooms: Sandboxes) -> None:
    two = f"{bash('touch a')}\n{bash('touch b')}"
    output, run = await attempt(rooms, "bash", two, "no block", bash("ls"), two, two, two)
    refused = [("exactly one block" in answer) for answer in answers(run)]
    assert refused == [True, True, False, True, True]
    assert "a\n" not in answers(run)[2]
    assert (output["submitted"], output["patch"]) == (False, "")
    assert run.metrics == {"format_errors": 5.0, "submitted": 0.0}
    thought = f"<think>Perhaps:\n{bash('touch a')}\n</think>{bash('ls')}"
    _, run = await attempt(rooms, "bash", thought, f"<think>{SUBMIT}", SUBMIT)
    assert answers(run)[0].split() == ["[exit", "status", "0]", "roman.py", "tests"]
    assert "exactly one block" in answers(run)[1]


@pytest.mark.asyncio(loop_scope="module")
async def test_only_what_is_handed_in_is_a_patch(rooms: Sandboxes) -> None:
    output, run = await attempt(rooms, "bash", bash("echo x > y"))
    assert len(run.asked) == run.max_turns
    assert output == {"patch": "", "submitted": False, "reason": "nothing was handed in"}
    # The word counts only as the first line.
    word = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    late = bash(f"echo; echo x; echo {word}")
    output, _ = await attempt(rooms, "bash", late, bash(f"echo {word}; exit 1"), word)
    assert not output["submitted"]
    # A repository that was destroyed, or filled, is told.
    fill = "for n in 1 2; do head -c 600000 /dev/zero | tr '\\0' x > big$n; done"
    for command, reason in (("rm -rf .git", "repository"), (fill, "")):
        output, _ = await attempt(rooms, "bash", bash(command), SUBMIT)
        assert (output["submitted"], output["patch"]) == (True, "")
        assert output["reason"] and reason in output["reason"]


@pytest.mark.asyncio(loop_scope="module")
async def test_tools_and_text(rooms: Sandboxes) -> None:
    output, run = await attempt(
        rooms,
        "tools",
        call("list_dir"),
        call("edit", path="roman.py", old='"""Roman numerals."""', new='"""Numerals."""'),
        calls(("write_file", {"path": "../out", "content": "x"})),
        call("fly"),
        call("submit"),
        call("list_dir"),
    )
    assert len(run.asked) == 5
    assert "roman.py" in answers(run)[0]
    assert [answer.startswith("Error") for answer in answers(run)] == [False, False, True, True]
    assert run.metrics == {"tool_errors": 2.0, "submitted": 1.0}
    assert '+"""Numerals."""' in output["patch"]
    # It ends with words, or too many errors.
    for script, ended in (
        ((call("list_dir"), "I am done."), (True, 2)),
        ((call("fly"),), (False, 10)),
    ):
        output, run = await attempt(rooms, "tools", *script)
        assert (output["submitted"], len(run.asked)) == ended
    write = {"tool": "write_file", "args": {"path": "a.txt", "content": "x\n"}}
    output, run = await attempt(
        rooms, "text", "THOUGHT: hm", f"TOOL_CALL: {json.dumps(write)}", "FINAL: I wrote it."
    )
    assert "+++ b/a.txt" in output["patch"]
    assert "write_file" in run.asked[0][1][0]["content"]
    output, _ = await attempt(rooms, "text", "TOOL_CALL: {")
    assert not output["submitted"]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_agent_never_sees_what_is_hidden(rooms: Sandboxes) -> None:
    """Neither in its prompt nor in its sandbox."""
    task = ROMAN.task()
    look = bash(
        "places='/work /tmp /home /root /etc /var /opt /srv';"
        "python3 -c 'import envserver_environments';"
        "find $places -name 'roman-*' 2>/dev/null;"
        "grep -rls test_[s]ubtractive $places; echo looked"
    )
    _, run = await attempt(rooms, "bash", look, SUBMIT)
    lines = answers(run)[0].splitlines()
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-2:] == ["ModuleNotFoundError: No module named 'envserver_environments'", "looked"]
    assert "test_subtractive" not in json.dumps([task.public, run.asked[0]])
    assert task.hidden["fail_to_pass"][0].endswith("test_subtractive")


@pytest.mark.thorough
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
    async with rollout_context(settings, swe, "swe") as parts:
        tasks = list(swe.tasks("train"))
        requests = [
            GroupRequest(
                group_id=f"g{n}", index=n, env="swe", split="train", seed=0, task=tasks[n % 20]
            )
            for n in range(groups)
        ]
        limit = asyncio.Semaphore(3)

        async def make(request: GroupRequest) -> Any:
            async with limit:
                return await make_group(parts, request)

        making = asyncio.gather(*map(make, requests))
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


@pytest.mark.parametrize(
    ("groups", "pause", "deaths"),
    [
        pytest.param(4, 1.5, 1, marks=pytest.mark.thorough),
        pytest.param(50, 1.0, 15, marks=pytest.mark.slow),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_workers_killed_at_random(groups: int, pause: float, deaths: int) -> None:
    before = descendants()
    assert await under_fire(groups=groups, group_size=4, pause=pause) >= deaths
    # Nothing is left, but for two that Python keeps for the next pool of this process.
    await until(
        lambda: all(
            pid in before or "multiprocessing" in words for pid, words in descendants().items()
        )
    )
