"""A run of `gaia` whose web was recorded, repeated without that web: the same, byte for byte."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import envserver, read_jsonl
from support.websites import websites

READER = Path(__file__).parents[2] / "support" / "gaia_reader.py"
AGENTS = ("code", "tools", "plain")
MEMBERS = 3


async def observed(folder: Path, mode: str, site: str, **more: Any) -> dict[str, list[list[str]]]:
    """What each rollout was shown, by the question of its group."""
    out = folder / f"{mode}-{len(list(folder.iterdir()))}.jsonl"
    flags = [word for name, value in more.items() for word in (f"--env.{name}", value)]
    ran = await asyncio.to_thread(
        envserver, "process", "--env", f"{READER}:Reader", "--model", "sim",
        "--sim.latency_seconds", 0, "--sim.solve_probability", 1, "--env.group_size", MEMBERS,
        "--env.data_path", folder / "copy", "--env.web", mode, "--env.web_folder", folder / "web",
        "--env.site", site, "--env.data_path_to_save_groups", out, *flags, folder=folder,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    groups = read_jsonl(out)
    assert all(min(group["scores"]) > 0.9 for group in groups), ran.stderr
    return {
        group["messages"][0][1]["content"]: [shown(messages) for messages in group["messages"]]
        for group in groups
    }


def shown(messages: list[dict[str, Any]]) -> list[str]:
    return [one["content"] for one in messages[2:] if one["role"] in ("user", "tool")]


@pytest.mark.thorough
async def test_a_recorded_run_is_repeated_offline_byte_for_byte(tmp_path: Path) -> None:
    pytest.importorskip("smolagents", reason="smolagents (extra gaia) is not installed")
    (tmp_path / "copy").mkdir()
    rows = [
        {"task_id": name, "Question": f"{name} {n}", "Level": 1, "Final answer": "42"}
        for n, name in enumerate(AGENTS)
    ]
    (tmp_path / "copy" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    async with websites() as sites:
        site = sites.url
        recorded = await observed(tmp_path, "record", site)
        asked = dict(sites.asked)
    assert asked == {"/search": 3, "/page": 1, "/none": 1}  # of 9 rollouts with 4 calls each
    assert len(recorded) == len(AGENTS)
    for first, *others in recorded.values():
        assert len(first) == 4
        assert all(other == first for other in others)
        assert not any("inside.py" in text for text in first)
        assert "About herons" in first[0] and "Visit 1" in first[1] and "404" in first[3]
    more = await observed(tmp_path, "replay", site, asks_more="true")
    assert set(more) == set(recorded)
    for question, members in more.items():
        assert [member[:4] for member in members] == recorded[question]
        misses = {member[4] for member in members}
        assert len(misses) == 1 and "recorded" in misses.pop()
