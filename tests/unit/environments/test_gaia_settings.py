"""Settings of `gaia` that change the agent: file tools, smolagents' prompts, plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import envserver, read_jsonl

TRIES = """
import os
os.symlink("/etc/passwd", "link")
os.symlink("/", "root")
os.mkfifo("fifo")
print(write_file("notes/a.txt", "one"))
print(append_to_file("notes/a.txt", " and two"))
print(read_file("/work/notes/a.txt"))
assert open("notes/a.txt").read() == "one and two"
refused = 0
for tool, *arguments in (
    (read_file, "/etc/passwd"), (read_file, "../../etc/passwd"), (read_file, "link"),
    (read_file, "root/etc/passwd"), (read_file, "fifo"), (read_file, "none.txt"),
    (read_file, "notes/../../etc/passwd"), (read_file, "a" + chr(0)),
    (write_file, "/tmp/x", "x"), (write_file, "link", "x"), (write_file, "root/tmp/x", "x"),
    (write_file, "../x", "x"), (write_file, "big", "x" * 1_000_001), (write_file, "notes", "x"),
    (append_to_file, "fifo", "x"), (append_to_file, "link", "x"),
):
    try:
        tool(*arguments)
    except RuntimeError as error:
        refused += 1
        print(arguments[0], error)
print("refused", refused)
answer = 7
"""


@pytest.fixture(autouse=True)
def _smolagents() -> None:
    pytest.importorskip("smolagents", reason="smolagents (extra gaia) is not installed")


def steps_of(folder: Path, solution: str, *flags: object) -> tuple[dict[str, Any], Any]:
    """The group of one rollout that executes `solution` and answers, and its steps."""
    (folder / "copy").mkdir()
    row = {"task_id": "1", "Question": "How many?", "Level": 1, "Final answer": "7"}
    (folder / "copy" / "metadata.jsonl").write_text(json.dumps({**row, "Solution": solution}))
    ran = envserver(
        "process", "--env", "gaia", "--model", "sim", "--sim.solve_probability", 1,
        "--sim.latency_seconds", 0, "--env.data_path", folder / "copy", "--env.group_size", 1,
        "--env.total_steps", 1, "--rollouts.scorer_processes", 1, "--out", "out.jsonl", *flags,
        folder=folder,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    (group,) = read_jsonl(folder / "out.jsonl")
    return group, group["envserver"]["rollouts"][0]["output"]["steps"]


def test_file_tools_stay_in_the_folder_of_the_rollout(tmp_path: Path) -> None:
    group, (step, _) = steps_of(tmp_path, TRIES, "--env.files", "true")
    assert step["error"] is None, step["observation"]
    told = step["observation"]
    assert "Made notes/a.txt: 3 bytes" in told
    assert "     1\tone and two" in told
    assert "root:x:" not in told
    assert "refused 16" in told
    assert told.count("only paths below /work are allowed") == 8
    assert group["scores"] == [1.0]


@pytest.mark.parametrize("agent", ["code", "tools"])
def test_smolagents_own_prompts_and_plans(tmp_path: Path, agent: str) -> None:
    """One conversation, in the words of the installed templates, and plans are no bad steps."""
    flags = ["--env.prompts", "smolagents", "--env.planning_interval", 1, "--env.agent", agent]
    group, steps = steps_of(tmp_path, "answer = 7", *flags, "--env.files", "true")
    assert [step["step"] for step in steps] == [0, 1, 0, 2]
    (messages,) = group["messages"]
    system, first, plan, go_on = messages[:4]
    assert system["content"].startswith("You are an expert assistant who can solve any task")
    assert "append_to_file" in system["content"] and "{{" not in system["content"]
    assert "Rules for the answer" in system["content"]
    assert first["content"].startswith("New task:\nHow many?")
    assert "## 1. Facts survey" in first["content"]
    assert plan["content"].endswith("<end_plan>")
    assert go_on["content"].startswith("Now proceed and carry out this plan.")
    renewed = messages[6 if agent == "tools" else 5]
    assert "Now write your updated facts below" in renewed["content"]
    components = group["envserver"]["rollouts"][0]["components"]
    assert components["format"] == components["errors"] == 0.0
    assert len(group["tokens"]) == 1


def test_the_plain_agent_has_no_templates(tmp_path: Path) -> None:
    words = ["process", "--env", "gaia", "--model", "sim", "--env.agent", "plain"]
    refused = envserver(*words, "--env.prompts", "smolagents", folder=tmp_path)
    assert refused.returncode == 2
    assert "the agent must be code or tools" in refused.stderr
