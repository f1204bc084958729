"""The command lines of four documents, by the table lines.toml; and docs/coming-from.md's own.

Offline, in a folder that holds what a fresh clone has, with the simulated engine.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.smolagents_integration import set_earlier_defaults
from envserver_local.simulated import ASSETS
from support.cases import cases_of
from support.commands import environment_variables, envserver, read_jsonl, running
from support.waiting import PATIENCE

ROOT = Path(__file__).parents[3]
SECTIONS = cases_of(__file__, "lines.toml")["section"]
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
    with running("models", "sim", "--port", 0, folder=tmp_path_factory.mktemp("engine")) as server:
        yield server.wait_for(r"http://\S+/v1")[0]


def typed(script: str, folder: Path, status: int = 0) -> str:
    """Runs lines in a shell that has this installation's commands; returns their output."""
    if script.startswith("envserver ") and not SHELLS & {*script}:
        done = envserver(*shlex.split(script)[1:], folder=folder)
    else:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        how = {"env": environment_variables() | {"PATH": path}, "cwd": folder, "check": False}
        words = ["bash", "-euo", "pipefail", "-c", script]
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, **how)
    said = done.stdout + done.stderr
    assert done.returncode == status, f"{script}\n{said[-3000:]}"
    return said


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


@pytest.mark.thorough
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


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "block"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_a_quick_start_runs_as_it_stands(name: str, block: str, clone: Path) -> None:
    if "smolagents" in name:
        pytest.importorskip("smolagents", reason="smolagents (extra gaia) is not installed")
    typed(block, clone)


def test_the_earlier_defaults_of_the_smolagents_integration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GAIA where it was downloaded, web tools where the key is set; else a line says what runs."""
    words = ["process", "--env.total_steps", "2"]
    none: dict[str, str] = {}
    set_earlier_defaults(words, none, tmp_path)
    assert none == {"ENVSERVER_ENV__FILES": "true"}
    assert "GAIA is not in data/gaia" in capsys.readouterr().err
    (tmp_path / "data" / "gaia").mkdir(parents=True)
    made = {"TAVILY_API_KEY": "k"}
    set_earlier_defaults(words, made, tmp_path)
    assert made.pop("TAVILY_API_KEY")
    assert made == {
        "ENVSERVER_ENV__DATA_SET": "gaia",
        "ENVSERVER_ENV__SPLIT": "validation",
        "ENVSERVER_ENV__FILES": "true",
        "ENVSERVER_ENV__WEB": "live",
        "ENVSERVER_ENV__WEB_DEPTH": "advanced",
    }
    chosen = {"ENVSERVER_ENV__WEB": "none", "ENVSERVER_ENV__FILES": "no", "TAVILY_API_KEY": "k"}
    own = dict(chosen)
    set_earlier_defaults([*words, "--env.data_set=sample"], own, tmp_path)
    assert own == chosen


@pytest.mark.thorough
def test_sft_rows_of_tokens_are_appended_when_asked(tmp_path: Path) -> None:
    line = (
        f"envserver sft-gen rows.jsonl --tokenizer {ASSETS} --env math --model sim"
        " --allow-negative-scores --sim.solve_probability 1 --num-seqs-to-save"
    )
    typed(f"{line} 6", tmp_path)
    rows = read_jsonl(tmp_path / "rows.jsonl")
    assert len(rows) == 6
    for row in rows:
        assert row["prefix"].endswith("<|im_start|>assistant\n") and row["score"] == 1.0
        assert row["completion"] and not row["completion"].startswith("<|im_start|>")
    assert "exists" in typed(f"{line} 2", tmp_path, status=2)
    typed(f"{line} 2 --append-to-previous", tmp_path)
    assert read_jsonl(tmp_path / "rows.jsonl")[:6] == rows
    assert len(read_jsonl(tmp_path / "rows.jsonl")) == 8


ENVIRONMENTS = ("code", "gaia", "math", "mhqa", "router", "swe", "tau", "video")


@pytest.mark.thorough
def test_sft_build_makes_rows_of_every_environment_and_teaches_no_failure(tmp_path: Path) -> None:
    """With its own templates."""
    pytest.importorskip("smolagents", reason="smolagents (extra gaia) is not installed")
    sim = "--model sim --sim.latency_seconds 0 --env.total_steps 2 --env.group_size 2"
    for name in ENVIRONMENTS:
        line = f"process --env {name} {sim} --env.include_actions true --out {name}.jsonl"
        typed(f"envserver {line}", tmp_path)
    files = " ".join(f"{name}.jsonl" for name in ENVIRONMENTS)
    typed(f"envserver convert {files} --out unified", tmp_path)
    said = typed("envserver sft build unified --out sft", tmp_path)
    rows = [
        json.loads(line)
        for path in (tmp_path / "sft").glob("*/*.jsonl")
        for line in path.read_text().splitlines()
    ]
    for name in ENVIRONMENTS:
        assert {row["tool"] for row in rows if row["meta"]["domain"] == name} - {"finalize"}, name
        assert f"{name}: " in said
    # A plan that was refused is no plan to learn.
    assert all("steps" in json.loads(row["output"]) for row in rows if row["tool"] == "plan")
