"""Runs of `gaia` as commands: file tools, prompts, plans; a web that is recorded and seen again."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from support.cases import cases_of, write_jsonl
from support.commands import envserver, read_jsonl
from support.extent import first_of
from support.websites import KEY, QUESTION, websites

CASES = cases_of(__file__)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of one task, whose solution the simulated model executes; a test may change it."""
    pytest.importorskip("smolagents", reason="smolagents (extra gaia) is not installed")
    (tmp_path / "copy").mkdir()
    return write_copy(tmp_path, {"Solution": "answer = 7"})


def write_copy(folder: Path, *rows: dict[str, Any]) -> Path:
    row = {"task_id": "1", "Question": "How many?", "Level": 1, "Final answer": "7"}
    path = folder / "copy" / "metadata.jsonl"
    write_jsonl(path, [{**row, **change} for change in rows])
    return folder


def process(folder: Path, *flags: object, env: object = "gaia", size: int = 1) -> list[Any]:
    """The groups of one run over the copy in `folder` with a model that is right."""
    ran = envserver(
        "process", "--env", env, "--model", "sim", "--sim.solve_probability", 1,
        "--sim.latency_seconds", 0, "--env.data_path", folder / "copy", "--env.group_size", size,
        "--rollouts.scorer_processes", 1, "--out", "out.jsonl", *flags, folder=folder,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert KEY not in ran.stderr
    groups = read_jsonl(folder / "out.jsonl")
    (folder / "out.jsonl").unlink()
    assert all(min(group["scores"]) > 0.9 for group in groups), ran.stderr
    return groups


def steps_of(group: dict[str, Any]) -> list[Any]:
    return [rollout["output"]["steps"] for rollout in group["envserver"]["rollouts"]]


@pytest.mark.thorough
def test_file_tools_stay_in_the_folder_of_the_rollout(copy: Path) -> None:
    (group,) = process(write_copy(copy, {"Solution": CASES["tries"]}), "--env.files", "true")
    ((step, _),) = steps_of(group)
    assert step["error"] is None, step["observation"]
    told = step["observation"]
    assert "Made notes/a.txt: 3 bytes" in told
    assert "     1\tone and two" in told
    assert "root:x:" not in told
    assert "refused 16" in told
    assert told.count("only paths below /work are allowed") == 8
    assert group["scores"] == [1.0]


@pytest.mark.thorough
@pytest.mark.parametrize("agent", first_of("code", "tools"))
def test_smolagents_own_prompts_and_plans(copy: Path, agent: str) -> None:
    """One conversation, in the words of the installed templates, and plans are no bad steps."""
    flags = ["--env.prompts", "smolagents", "--env.planning_interval", 1, "--env.agent", agent]
    (group,) = process(copy, *flags, "--env.files", "true")
    assert [step["step"] for step in steps_of(group)[0]] == [0, 1, 0, 2]
    (messages,) = group["messages"]
    system, first, plan = messages[:3]
    assert system["content"].startswith("You are an expert assistant who can solve any task")
    assert "append_to_file" in system["content"] and "{{" not in system["content"]
    assert "Rules for the answer" in system["content"]
    assert first["content"].startswith("New task:\nHow many?")
    assert plan["content"].endswith("<end_plan>")
    components = group["envserver"]["rollouts"][0]["components"]
    assert components["format"] == components["errors"] == 0.0
    assert len(group["tokens"]) == 1


@pytest.mark.thorough
async def test_a_recorded_run_is_seen_again_offline(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(mode: str, site: str) -> dict[str, Any]:
        flags = [
            "--env.web",
            mode,
            "--env.web_folder",
            copy / "web",
            "--env.web_provider_url",
            site,
        ]
        flags += ["--env.web_allow_private", "true"]
        (group,) = await asyncio.to_thread(process, copy, *flags, size=2)
        return group  # type: ignore[no-any-return]

    async with websites() as sites:
        site = sites.url
        write_copy(copy, {"Question": QUESTION, "Solution": CASES["looks"].replace("SITE", site)})
        monkeypatch.setenv("TAVILY_API_KEY", KEY)
        recorded = await run("record", site)
        assert sites.asked == {"/search": 1, "/page": 1, "/leak": 1, "/none": 1}
    monkeypatch.delenv("TAVILY_API_KEY")
    replayed = await run("replay", site)
    members = [steps[0]["observation"] for steps in steps_of(recorded) + steps_of(replayed)]
    assert len(members) == 4 and len(set(members)) == 1
    for part in ("1. About herons", "# Visit 1", "it is not available", "HTTP status 404"):
        assert part in members[0]
    assert "Seven" not in members[0] and QUESTION not in members[0]
    for group, mode in ((recorded, "record"), (replayed, "replay")):
        assert group["scores"] == [1.0, 1.0]
        assert all("web_leak_dropped" in one["flags"] for one in group["envserver"]["rollouts"])
        shown = group["envserver"]["services"]["web"]
        assert (shown["mode"], shown["epoch"], shown["answers"]) == (mode, "1", 4)
    assert re.fullmatch("[0-9a-f]{64}", shown["digest"])
    assert shown["digest"] == recorded["envserver"]["services"]["web"]["digest"]
