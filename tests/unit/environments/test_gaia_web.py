"""GAIA agents on the web: recorded by one run, seen again by the next, offline; leaks kept out."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.commands import envserver, read_jsonl
from support.websites import KEY, QUESTION, websites

LOOKS = """
print(web_search("herons"))
print(visit_page("SITE/page"))
for place in ("SITE/leak", "SITE/none"):
    try:
        visit_page(place)
    except RuntimeError as error:
        print(error)
answer = 7
"""


def run(folder: Path, name: str, site: str, *flags: object) -> dict[str, Any]:
    """The group of one run over the one task in `folder`."""
    ran = envserver(
        "process", "--env", "gaia", "--model", "sim", "--sim.solve_probability", 1,
        "--env.data_path", folder / "copy", "--env.group_size", 2, "--env.total_steps", 1,
        "--rollouts.scorer_processes", 1, "--env.web_folder", folder / "web",
        "--env.web_allow_private", "true", "--env.web_provider_url", site,
        "--env.data_path_to_save_groups", f"{name}.jsonl", *flags,
        folder=folder,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert KEY not in ran.stderr
    (group,) = read_jsonl(folder / f"{name}.jsonl")
    return group  # type: ignore[no-any-return]


def observed(group: dict[str, Any]) -> list[str]:
    rollouts = group["envserver"]["rollouts"]
    return [rollout["output"]["steps"][0]["observation"] for rollout in rollouts]


@pytest.mark.thorough
async def test_a_recorded_run_is_seen_again_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("smolagents", reason="smolagents (extra gaia) is not installed")
    (tmp_path / "copy").mkdir()
    async with websites() as sites:
        row = {"task_id": "1", "Question": QUESTION, "Level": 1, "Final answer": "7"}
        solution = LOOKS.replace("SITE", sites.url)
        (tmp_path / "copy" / "metadata.jsonl").write_text(json.dumps({**row, "Solution": solution}))
        site = sites.url
        monkeypatch.setenv("TAVILY_API_KEY", KEY)
        recorded = await asyncio.to_thread(run, tmp_path, "recorded", site, "--env.web", "record")
        assert sites.asked == {"/search": 1, "/page": 1, "/leak": 1, "/none": 1}
    monkeypatch.delenv("TAVILY_API_KEY")
    replayed = await asyncio.to_thread(run, tmp_path, "replayed", site, "--env.web", "replay")
    (first, second), again = observed(recorded), observed(replayed)
    assert first == second == again[0] == again[1]
    for part in ("1. About herons", "# Visit 1", "it is not available", "HTTP status 404"):
        assert part in first
    assert "Seven" not in first and QUESTION not in first
    for group, mode in ((recorded, "record"), (replayed, "replay")):
        assert group["scores"] == [1.0, 1.0]
        assert all("web_leak_dropped" in one["flags"] for one in group["envserver"]["rollouts"])
        shown = group["envserver"]["services"]["web"]
        assert (shown["mode"], shown["epoch"], shown["answers"]) == (mode, "1", 4)
    assert re.fullmatch("[0-9a-f]{64}", shown["digest"])
    assert shown["digest"] == recorded["envserver"]["services"]["web"]["digest"]
