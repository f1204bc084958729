"""The command lines of four documents, by the table lines.toml; and docs/coming-from.md's own.

Offline, in a folder that holds what a fresh clone has, with the simulated engine.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import environment_variables, envserver, running
from support.waiting import PATIENCE

pytestmark = pytest.mark.thorough
ROOT = Path(__file__).parents[3]
SECTIONS = tomllib.loads(Path(__file__).with_name("lines.toml").read_text())["section"]
BLOCKS = re.findall(
    r"^### (.+?)\n.*?^```bash\n(.+?)^```", (ROOT / "docs/coming-from.md").read_text(), re.M | re.S
)
SHELLS = {*"&|;$`<>\\\n"}
"""Characters that only a shell understands."""
MODEL = re.compile(r'"gpt-4o"|"your-model-name"')
ADDRESS = re.compile(r"https://api\.openai\.com/v1|http://localhost:8000/v1")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with what lines of a clone need of it."""
    for name in ("environments", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an engine that knows nothing of us."""
    folder = tmp_path_factory.mktemp("engine")
    with running("models", "sim", "--port", 0, folder=folder) as server:
        yield server.wait_for(r"http://\S+/v1")[0]


def typed(script: str, folder: Path, status: int = 0) -> str:
    """Runs lines in a shell that has this installation's commands; returns their output."""
    if script.startswith("envserver ") and not SHELLS & {*script}:
        done = envserver(*shlex.split(script)[1:], folder=folder)
    else:
        done = typed_in_a_shell(script, folder)
    said = done.stdout + done.stderr
    assert done.returncode == status, f"{script}\n{said[-3000:]}"
    return said


def typed_in_a_shell(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    variables = environment_variables() | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    }
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def check(line: dict[str, Any], folder: Path, engine: str) -> None:
    """Runs a line of the table and compares what came of it."""
    if "typed" in line:
        assert line["told"] in typed(line["typed"], folder, status=2)
    script = line.get("ours", line["theirs"])
    if "why" in line and not line.keys() & {"ours", "status"}:
        return
    script = MODEL.sub("sim", ADDRESS.sub(engine, script))
    said = typed(script, folder, line.get("status", 0))
    for part in line.get("says", []):
        assert part in said, (script, said[-3000:])
    for pattern, count in line.get("made", {}).items():
        assert len(list(folder.glob(pattern))) == count, (script, pattern)
    for name, count in line.get("lines", {}).items():
        assert (folder / name).read_text().count("\n") == count, (script, name)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section["document"])
def test_each_line_of_the_table(section: dict[str, Any], clone: Path, engine: str) -> None:
    if "needs" in section:
        pytest.importorskip(section["needs"], reason=f"{section['needs']} is not installed")
    for name, text in section.get("files", {}).items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text(text.lstrip("\n"))
    routes = (json.dumps(route(number)) + "\n" for number in range(section.get("routes", 0)))
    (clone / "output.jsonl").write_text("".join(routes))
    for line in section["line"]:
        check(line, clone, engine)


def route(number: int) -> dict[str, Any]:
    """A row of CourseGPT-Pro's routing data."""
    return {
        "id": f"router_{number:04}",
        "user_query": f"What is {number} * {number}?",
        "task_summary": "A product.",
        "route_plan": [f"/math(expression='{number} * {number}')"],
        "route_rationale": "It is arithmetic.",
        "expected_artifacts": ["the number"],
        "thinking_outline": ["multiply"],
        "handoff_plan": "/math",
        "todo_list": ["multiply"],
        "difficulty": "introductory",
        "tags": ["arithmetic"],
        "acceptance_criteria": ["the number is right"],
        "metrics": {"primary": ["exact"], "secondary": []},
    }


def test_the_page_has_a_quick_start_for_each_predecessor() -> None:
    assert [name for name, _ in BLOCKS] == [
        "VideoMultiAgents_HOEY",
        "esm-agentbench",
        "CourseGPT-Pro",
        "The smolagents integration of Atropos",
    ]


@pytest.mark.parametrize(("name", "block"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_a_quick_start_runs_as_it_stands(name: str, block: str, clone: Path) -> None:
    if "smolagents" in name:
        pytest.importorskip("smolagents", reason="smolagents (extra gaia) is not installed")
    typed(block, clone)
