"""Packages of environments are installed, found, run in their own interpreter, shared and removed;
environments of another framework are found by scheme and run in its backend.
"""

import itertools
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.cases import cases_of
from support.commands import read_jsonl, typed
from support.env_packages import home, wheel

from envserver import ConfigError, registry
from envserver.cli import main

CASES = cases_of(__file__)

__all__ = ["home"]

CODE = CASES["code"]
PLAIN = CODE.format(imports="", version='"1"', number="1.0")


def sums(folder: Path, *requires: str, code: str = PLAIN, manifest: str = "") -> Path:
    files = {"my_sums/__init__.py": code} | (
        {"my_sums/environment.yaml": manifest} if manifest else {}
    )
    return wheel(folder, "my-sums", files, requires=requires, environments=["sums = my_sums:Sums"])


class Line:
    """Runs command lines in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, line: str) -> str:
        """What a command prints that must succeed."""
        return typed(line, self.folder).stdout

    def refused(self, line: str) -> str:
        """What a command says that must refuse."""
        return " ".join(typed(line, self.folder, status=2).stderr.split())


@pytest.fixture
def run(tmp_path: Path) -> Line:
    return Line(tmp_path)


@pytest.mark.thorough
def test_a_package_with_met_dependencies_is_shared(run: Line, tmp_path: Path, home: Path) -> None:
    path = sums(tmp_path, "envserver>=0.2", "pydantic>=2", manifest="name: sums\nversion: '1.0'\n")
    assert run(f"env install {path}") == "sums\n"
    assert "already" in run.refused(f"env install {path}")
    assert f"my-sums  1.0      shared  sums          {path}" in run("env list")
    listed = [line.split() for line in run("list").splitlines()]
    assert ["sums", "pooled", "my-sums", "Adds", "numbers."] in listed
    manifest = (home / "my-sums" / "environment.yaml").read_text()
    assert "licence: MIT\nisolation: pooled\nreward_range:\n- -1.0\n- 1.0\n" in manifest
    run("env remove sums")
    assert "Adds numbers" not in run("list")
    assert not list(home.iterdir())


def test_what_is_no_new_package_is_refused(run: Line, tmp_path: Path, home: Path) -> None:
    (tmp_path / "my_env").mkdir()
    nothing = wheel(tmp_path, "nothing", {"nothing.py": ""})
    math = wheel(tmp_path, "other", {"other.py": ""}, environments=["math = other:Math"])
    missing = sums(tmp_path, "simpleeval<1")
    for words, why in (
        ("install my_env", "no pyproject.toml"),
        (f"install {nothing}", "offers no environment"),
        (f"install {math}", "already is an environment 'math'"),
        (f"install {missing} --interpreter shared", "needs simpleeval<1 (here:"),
        ("remove x", "not installed. Installed: nothing"),
    ):
        assert why in run.refused(f"env {words}")
    assert not home.exists()


@pytest.mark.thorough
def test_what_cannot_be_used_leaves_nothing(run: Line, tmp_path: Path, home: Path) -> None:
    for how, why in CASES["unusable"]:
        assert why in run.refused(f"env install {sums(tmp_path, **how)}")
    absent = sums(tmp_path, "no-such-package-anywhere")
    assert "no-such-package-anywhere" in run.refused(f"env install {absent}")
    assert not list(home.iterdir())


@pytest.mark.thorough
def test_a_package_with_conflicting_versions_runs_beside_math(run: Line, tmp_path: Path) -> None:
    """The other package is made here."""
    wheel(tmp_path, "simpleeval", {"simpleeval.py": "VERSION = 0.5\n"}, version="0.5")
    version = "simpleeval.VERSION"
    code = CODE.format(imports="import simpleeval", version=version, number=version)
    run(f"env install {sums(tmp_path, 'envserver>=0.2', 'simpleeval<1', code=code)}")
    assert "my-sums (own venv)" in run("list")
    check_mix(run, 0.5)
    assert "--env.largest" in run.refused("process --env sums --model sim --env.largest x")


@pytest.mark.thorough
def test_services_tools_and_hooks_run_in_an_own_interpreter(run: Line, tmp_path: Path) -> None:
    code = PLAIN.replace("import itertools", "import itertools, os, sys", 1)
    imports = "from contextlib import asynccontextmanager\nfrom envserver import Caller, tool\n"
    code = code.replace("    def score_group", CASES["served"] + "\n    def score_group", 1)
    run(f"env install {sums(tmp_path, code=imports + code)} --interpreter own")
    flags = "--env.total_steps 2 --env.group_size 2"
    run(f"process --env sums --model sim --out out.jsonl {flags}")
    groups = [line["envserver"] for line in read_jsonl(tmp_path / "out.jsonl")]
    rollouts = [one for group in groups for one in group["rollouts"]]
    assert [one["reward"] for one in rollouts] == [1.0] * 4
    assert all(one["hooks"][0]["reason"] == "the question" for one in rollouts)
    failing = "process --env sums --model sim --env.largest 1 --env.total_steps 2"
    said = " ".join(typed(failing, tmp_path, status=1).stderr.split())
    bug = "A bug in the environment: The service 'double' failed: KeyError (__init__.py:"
    assert bug in said and "double)" in said.rpartition(bug)[2]
    # Under the debugger all runs in that interpreter, so that prints are shown.
    shown = run("run --env sums --task sum-1 --model sim --debug")
    assert f"rollout in {tmp_path}" in shown and "my-sums/venv" in shown


@pytest.mark.thorough
def test_tasks_go_on_in_a_new_process_when_theirs_dies(run: Line, tmp_path: Path) -> None:
    died = tmp_path / "died"
    dies = (
        f"if index == 40 and not Path({str(died)!r}).exists():\n"
        f"                Path({str(died)!r}).touch()\n"
        "                os._exit(3)\n"
        "            a, b ="
    )
    code = PLAIN.replace("import itertools", "import itertools, os\nfrom pathlib import Path")
    derives = (
        "largest: int = 9\n        max_turns: int = 0\n\n"
        "        def model_post_init(self, context):\n"
        "            self.max_turns = self.max_turns or self.largest + 1\n"
    )
    code = code.replace("a, b =", dies).replace("largest: int = 9", derives)
    run(f"env install {sums(tmp_path, code=code)} --interpreter own")
    registry._found.cache_clear()
    kind = registry.find("sums")
    environment = kind(kind.Config.model_validate({"largest": 7}))
    assert environment.config.max_turns == 8  # which its own Config derives
    tasks = list(itertools.islice(environment.tasks("train"), 100))
    assert [task.id for task in tasks] == [f"sum-{index}" for index in range(100)]
    assert died.exists()
    next(tmp_path.rglob("venv/bin/python")).unlink()  # as after an upgrade of Python
    registry._found.cache_clear()
    with pytest.raises(ConfigError, match="was installed for Python"):
        registry.find("sums")


def check_mix(run: Line, version: float) -> None:
    """Tasks, rollouts, scores and group scores of `sums` see their own library."""
    flags = "--env.total_steps 6 --env.group_size 2 --env.ensure_scores_are_not_same false"
    run(f"process --env math=1,sums=1 --model sim --out out.jsonl {flags}")
    groups = [line["envserver"] for line in read_jsonl(run.folder / "out.jsonl")]
    assert sorted(one["env"] for one in groups) == ["math"] * 3 + ["sums"] * 3
    expected = {"same": 1.0, "version": version, "in_group": version}
    for one in groups:
        if one["env"] == "sums":
            assert all(made["metrics"].items() >= expected.items() for made in one["rollouts"])


# Shared on the hub


MANIFEST = """\
name: sums
isolation: pooled
reward_range: [-1, 1]
determinism: The same tasks for the same settings.
data_sources: [made by the program]
score_card: README.md
"""


def project(folder: Path, manifest: str = MANIFEST) -> Path:
    """Writes a project with files that must not leave this machine."""
    files = {
        "pyproject.toml": '[project]\nname = "my-sums"\nversion = "1.0"\nlicense = "MIT"\n'
        '[project.entry-points."envserver.environments"]\nsums = "my_sums:Sums"\n',
        "README.md": "# Sums\n",
        "environment.yaml": manifest,
        "my_sums/__init__.py": PLAIN,
        ".env": "KEY=secret\n",
        "build/old.py": "",
        "my_sums/__pycache__/x.pyc": "",
    }
    for name, text in files.items():
        path = folder / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "project"


def test_push_without_a_token_shows_what_would_be_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    place = project(tmp_path)
    ended = typed(f"env push {place} --to me/sums", tmp_path)
    names = ["README.md", "environment.yaml", "my_sums/__init__.py", "pyproject.toml"]
    assert ended.stdout.split() == [f"hf://datasets/me/sums/{name}" for name in names]
    assert "sums 1.0 was not uploaded" in ended.stderr
    assert (place / "README.md").read_text() == "# Sums\n"

    # What nobody should use is refused.
    def refusal(to: str = "me/sums") -> str:
        assert main(["env", "push", str(place), "--to", to, "--dry-run"]) == 2
        return " ".join(capsys.readouterr().err.split())

    for manifest, reason in (
        (MANIFEST.replace("determinism", "determinsm"), "unknown field `determinsm`"),
        (MANIFEST.replace("data_sources: [made by the program]\n", ""), "has no data_sources"),
        (MANIFEST.replace("README.md", "CARD.md"), "'CARD.md' is not a file of the project"),
        (f"{MANIFEST}licence: GPL-3.0-only\n", "but the package says 'MIT'"),
    ):
        project(tmp_path, manifest)
        assert reason in refusal()
    project(tmp_path)
    (place / "server.pem").touch()
    assert "server.pem looks like a key" in refusal()
    assert "not a name on the hub" in refusal("sums")


class FolderHub:
    """A hub that is a folder: what was uploaded is fetched."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def create_repo(self, name: str, **options: Any) -> None:
        assert options == {"repo_type": "dataset", "private": True, "exist_ok": True}

    def upload_folder(self, *, repo_id: str, folder_path: str, **options: Any) -> None:
        shutil.copytree(folder_path, self.root / repo_id)

    def fetch(self, name: str, *, revision: str | None, local_dir: Path, **options: Any) -> str:
        assert revision == "v1"
        return str(shutil.copytree(self.root / name, local_dir))


@pytest.mark.thorough
def test_what_was_pushed_is_installed_from_the_hub(
    run: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "HfApi", lambda: FolderHub(tmp_path / "hub"))
    monkeypatch.setattr(hub, "get_token", lambda: "a token")
    monkeypatch.setattr(hub, "snapshot_download", FolderHub(tmp_path / "hub").fetch)
    folder = project(tmp_path)
    # Its build needs nothing from an index: it copies a wheel.
    shutil.copy(sums(tmp_path), folder)
    (folder / "copying.py").write_text(
        "import pathlib, shutil\n"
        "def build_wheel(folder, *rest):\n"
        "    (wheel,) = pathlib.Path().glob('*.whl')\n"
        "    return pathlib.Path(shutil.copy(wheel, folder)).name\n"
    )
    with (folder / "pyproject.toml").open("a") as file:
        file.write('[build-system]\nrequires = []\nbuild-backend = "copying"\n')
        file.write('backend-path = ["."]\n')
    assert main(["env", "push", str(folder), "--to", "me/sums"]) == 0
    card = (tmp_path / "hub" / "me" / "sums" / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\ntags:\n- envserver-environment\n---\n\n# Sums")
    assert main(["env", "install", "hub:me/sums@v1"]) == 0
    assert capsys.readouterr().out.endswith("sums\n")
    assert "my-sums  1.0      shared" in run("env list")


# Frameworks


FRAMEWORK = """
VERSION = {version}

def load(name):
    return {{"question": "Which version of " + name + "?", "answer": str(VERSION)}}
"""


@pytest.fixture
def bridge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that offers the scheme `gym`."""
    place = tmp_path / "site"
    info = place / "gym_bridge-1.0.dist-info"
    info.mkdir(parents=True)
    (place / "gym_bridge.py").write_text(CASES["bridge"])
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gym-bridge\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[envserver.integrations]\ngym = gym_bridge:INTEGRATION\n"
    )
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])
    )


@pytest.mark.thorough
@pytest.mark.usefixtures("bridge")
def test_environments_of_a_framework_share_a_backend(run: Line, tmp_path: Path, home: Path) -> None:
    said = run.refused("process --env gym:hanoi --model sim")
    assert "gym:hanoi needs the package 'little_gym'" in said
    assert "envserver env install gym:hanoi" in said
    assert "Did you mean 'gym:go'?" in run.refused("process --env gim:go")
    assert "gym:NAME" in (listed := run("list")) and "games of a gym" in listed
    for version in (1, 2):
        code = {"little_gym/__init__.py": FRAMEWORK.format(version=version)}
        wheel(tmp_path, "little-gym", code, version=f"{version}.0")
    extra = wheel(tmp_path, "hanoi", {"hanoi.py": ""})
    assert run(f"env install gym:hanoi --with {extra}") == "gym:hanoi\n"
    said = run.refused("process --env gym:go --model sim")
    assert "gym:go is not installed; others of gym are" in said
    assert "gym:go" in run("env install gym:go")
    said = run.refused("env install gym:missing")
    assert "no such game" in said and "Error" not in said and "File" not in said
    assert "installed already" in run.refused("env install gym:go")
    assert "little-gym  2.0" in run("env list")
    site = next((home / "little-gym" / "venv").glob("lib/python*/site-packages"))
    assert (site / "hanoi.py").exists() and (site / "little_gym" / "ready").exists()

    same = "--model sim --env.ensure_scores_are_not_same false"
    run(f"process --env gym:hanoi {same} --env.group_size 2 --limit 1 --out rows.jsonl")
    (group,) = read_jsonl(tmp_path / "rows.jsonl")
    assert group["scores"] == [1.0, 1.0]
    record = home / "little-gym" / "installed.json"
    record.write_text(re.sub(r'"envserver": "[^"]+"', '"envserver": "0.0.1"', record.read_text()))
    done = typed(f"process --env math=1,gym:go=1 {same} --limit 2 --out mix.jsonl", tmp_path)
    assert "little-gym was installed by envserver 0.0.1" in done.stderr

    run("env remove gym:go")
    assert "gym:go" not in run("env list")
    run("env remove gym:hanoi")
    assert not list(home.iterdir())
