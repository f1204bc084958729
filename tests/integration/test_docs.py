"""The documentation is true: links lead somewhere, what it shows works as it stands there."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from support import cards
from support.commands import typed
from support.learning import tiny_model, variables
from support.pages import commands, write_files
from support.waiting import PATIENCE

from envserver import Settings
from envserver.cli.command_line import CommandSpec

ROOT = Path(__file__).parents[2]
TRACKED = subprocess.run(
    ["git", "ls-files", "-co", "--exclude-standard", "*.md"],
    cwd=ROOT, capture_output=True, text=True, check=True,
).stdout.split()  # fmt: skip
PAGES = sorted(ROOT / name for name in TRACKED if (ROOT / name).is_file())
LINK = re.compile(r"(?:\]\(|src(?:set)?=\")(?!https?:|mailto:)([^)\"\s]+)[)\"]")
FILE = re.compile(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|md|yaml|toml))`")
FOLDERS = (".", "envserver", "clients", "environments", "tools")


def test_links_lead_somewhere() -> None:
    assert len(PAGES) > 50
    broken = []
    for page in PAGES:
        for link in LINK.findall(page.read_text()):
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_files_that_the_map_names_exist(page: str) -> None:
    named = FILE.findall((ROOT / page).read_text())
    missing = [name for name in named if not any((ROOT / top / name).exists() for top in FOLDERS)]
    assert missing == []


# The README


def block(page: str, language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert found, f"{page} has no {language} block"
    return found.group(1)


def test_the_first_environment_has_thirty_lines_and_runs(tmp_path: Path) -> None:
    code = block("README.md", "python")
    assert len(code.splitlines()) <= 30
    (tmp_path / "addition.py").write_text(code)
    flags = "--env.total_steps 2 --model sim"
    typed(f"process --env addition.py {flags}", tmp_path)
    lines = (tmp_path / "data" / "addition.jsonl").read_text().splitlines()
    groups = [json.loads(line) for line in lines]
    assert [len(group["tokens"]) for group in groups if "tokens" in group] == [4, 4]


def test_the_settings_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(block("docs/guide.md", "yaml"))
    settings = CommandSpec("", "", Settings).read(
        ["--config", str(path)], environ={}, folder=tmp_path
    )
    assert settings.environment == "math"
    assert settings.env.group_size == 8
    assert len(settings.openai.base_urls) == 2


# The notebook and the score cards

CHEAP = ("math", "kuhn")
"""Those whose check takes seconds; what runs programs takes minutes."""


@pytest.mark.thorough
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    """In a real kernel."""
    notebook = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=PATIENCE, resources=resources).execute()

    def text(output: Any) -> str:
        return str(output.get("data", {}).get("text/plain", output.get("text", "")))

    shown = [text(output) for cell in notebook.cells for output in cell.get("outputs", ())]
    assert "'exact'" in shown
    assert any(text.startswith("(6, ") for text in shown)
    assert any("tea" in text for text in shown)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough if name in CHEAP else pytest.mark.slow)
        for name in cards.SHIPPED
    ],
)
def test_the_card_of_an_environment_is_what_check_finds(name: str, tmp_path: Path) -> None:
    told = typed(f"check {name} --card", tmp_path).stdout
    assert cards.made_card(told) == cards.card_in(cards.readme(name).read_text()), (
        "`make cards` writes them anew"
    )


# The tutorial, from rows to a trained model

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
CORE, MODEL = PAGE.split("## 5. A model")
ELSEWHERE = ("make ", "source ", "mkdir ", "cd ")
"""Commands of the installation, which a test cannot wait for."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the tutorial, with its files."""
    assert write_files(PAGE, tmp_path) == ["make_rows.py", "first_try.py", "sums.py", "serve.yaml"]
    subprocess.run([sys.executable, "-S", "make_rows.py"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(python: Path, lines: list[str]) -> str:
    """Runs the page's commands with the programs beside `python`; returns what they print."""
    done = subprocess.run(
        ["bash", "-euxc", "\n".join([line for line in lines if not line.startswith(ELSEWHERE)])],
        capture_output=True,
        text=True,
        check=False,
        env={**variables(), "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.mark.thorough  # commands
def test_its_commands_work_without_a_model(folder: Path) -> None:
    told = run(Path(sys.executable), commands(CORE))
    assert "question echoed" in told and "The check fails." in told
    assert "All checks passed" in told
    groups = [json.loads(line) for line in (folder / "sums.jsonl").read_text().splitlines()]
    assert len([group for group in groups if "tokens" in group]) == 4
    assert "What is" in (folder / "sums.html").read_text()


@pytest.mark.slow
def test_a_model_learns_it(folder: Path, learn_python: Path) -> None:
    lines = commands(MODEL)
    assert lines.count("envserver models tiny out/tiny") == 1
    shutil.copytree(tiny_model(learn_python), folder / "out" / "tiny")
    run(learn_python, [line for line in lines if "models tiny" not in line])
    before, after = (
        json.loads((folder / "runs" / name / "report.json").read_text())
        for name in ("before", "after")
    )
    assert (folder / "out" / "learn" / "curves.png").exists()
    rewards = [one["run"]["overall"]["mean_reward"]["value"] for one in (before, after)]
    assert rewards[1] > rewards[0]
    lines = (folder / "out" / "learn" / "metrics.jsonl").read_text().splitlines()
    assert fmean(json.loads(line)["reward_mean"] for line in lines[-10:]) >= 0.8
