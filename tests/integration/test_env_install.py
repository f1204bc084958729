"""Packages of environments are installed, found, run in their own interpreter, and removed."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.commands import envserver, read_jsonl
from support.env_packages import home, refused, run, wheel
from support.waiting import PATIENCE

from envserver import ConfigError, registry
from envserver.cli import main

__all__ = ["home"]

CODE = '''
import itertools
from envserver import Environment, Score, Task
{imports}

class Sums(Environment):
    """Adds numbers."""

    name = "sums"
    reward_range = (-1.0, 1.0)

    class Config(Environment.Config):
        largest: int = 9
        """The largest number."""

    def tasks(self, split):
        for index in itertools.count():
            a, b = index % self.config.largest, 2
            hidden = {{"answer": a + b, "version": {version}}}
            yield Task(f"sum-{{index}}", {{"question": f"{{a}}+{{b}}?"}}, hidden)

    async def rollout(self, task, run):
        reply = await run.chat([{{"role": "user", "content": task.public["question"]}}])
        return {{"text": reply.content, "version": {version}}}

    def score(self, task, result):
        output = result.output if isinstance(result.output, dict) else {{"text": "", "version": ""}}
        right = str(task.hidden["answer"]) in output["text"]
        same = task.hidden["version"] == output["version"] == {version}
        return Score(reward=float(right), metrics={{"same": float(same), "version": {number}}})

    def score_group(self, task, results, scores):
        metrics = [{{**one.metrics, "in_group": {number}}} for one in scores]
        return [Score(reward=one.reward, metrics=more) for one, more in zip(scores, metrics)]

    def demonstration(self, task):
        return [{{"role": "assistant", "content": str(task.hidden["answer"])}}]
'''
PLAIN = CODE.format(imports="", version='"1"', number="1.0")


def sums(folder: Path, *requires: str, code: str = PLAIN, manifest: str = "") -> Path:
    files = {"my_sums/__init__.py": code} | (
        {"my_sums/environment.yaml": manifest} if manifest else {}
    )
    point = "sums = my_sums:Sums"
    return wheel(folder, "my-sums", files, requires=requires, environments=[point])


@pytest.mark.thorough
def test_a_package_whose_dependencies_are_met_shares_the_interpreter(
    tmp_path: Path, home: Path
) -> None:
    path = sums(tmp_path, "envserver>=0.2", "pydantic>=2", manifest="name: sums\nversion: '1.0'\n")
    assert run("env", "install", path, folder=tmp_path) == "sums\n"
    assert "already" in refused("env", "install", path, folder=tmp_path)
    assert f"my-sums  1.0      shared  sums          {path}" in run("env", "list", folder=tmp_path)
    listed = [line.split() for line in run("list", folder=tmp_path).splitlines()]
    assert ["sums", "pooled", "my-sums", "Adds", "numbers."] in listed
    manifest = (home / "my-sums" / "environment.yaml").read_text()
    assert "licence: MIT\nisolation: pooled\nreward_range:\n- -1.0\n- 1.0\n" in manifest
    run("env", "remove", "sums", folder=tmp_path)
    assert "Adds numbers" not in run("list", folder=tmp_path)
    assert not list(home.iterdir())


def test_what_is_not_a_new_package_of_environments_is_refused(tmp_path: Path, home: Path) -> None:
    (tmp_path / "my_env").mkdir()
    assert "no pyproject.toml" in refused("env", "install", "my_env", folder=tmp_path)
    nothing = wheel(tmp_path, "nothing", {"nothing.py": ""})
    assert "offers no environment" in refused("env", "install", nothing, folder=tmp_path)
    math = wheel(tmp_path, "other", {"other.py": ""}, environments=["math = other:Math"])
    assert "already is an environment 'math'" in refused("env", "install", math, folder=tmp_path)
    missing = sums(tmp_path, "simpleeval<1")
    words = ("env", "install", missing, "--interpreter", "shared")
    assert "needs simpleeval<1 (here:" in refused(*words, folder=tmp_path)
    assert "not installed. Installed: nothing" in refused("env", "remove", "x", folder=tmp_path)
    assert not home.exists()


@pytest.mark.thorough
def test_what_cannot_be_used_leaves_nothing(tmp_path: Path, home: Path) -> None:
    broken = sums(tmp_path, code="import no_such_module")
    assert "no_such_module" in refused("env", "install", broken, folder=tmp_path)
    lying = sums(tmp_path, manifest="name: sums\nreward_range: [0, 1]\n")
    said = refused("env", "install", lying, folder=tmp_path)
    assert "reward_range of 'sums' is [0.0, 1.0], but the package says [-1.0, 1.0]" in said
    absent = sums(tmp_path, "no-such-package-anywhere")
    assert "no-such-package-anywhere" in refused("env", "install", absent, folder=tmp_path)
    assert not list(home.iterdir())


@pytest.mark.thorough
def test_a_package_with_conflicting_dependencies_runs_beside_math(tmp_path: Path) -> None:
    """The other package is made here; the next test has a real one."""
    wheel(tmp_path, "simpleeval", {"simpleeval.py": "VERSION = 0.5\n"}, version="0.5")
    code = CODE.format(
        imports="import simpleeval", version="simpleeval.VERSION", number="simpleeval.VERSION"
    )
    path = sums(tmp_path, "envserver>=0.2", "simpleeval<1", code=code)
    run("env", "install", path, folder=tmp_path)
    assert "my-sums (own venv)" in run("list", folder=tmp_path)
    check_mix(tmp_path, 0.5)
    said = refused(
        *("process", "--env", "sums", "--model", "sim", "--env.largest", "x"), folder=tmp_path
    )
    assert "--env.largest" in said


SERVED = """
    async def rollout(self, task, run):
        print("rollout in", sys.prefix)
        reply = await run.chat([{"role": "user", "content": "?"}])
        told = [await run.call_tool("double", {"of": 4}), await run.call_tool("answer", {})]
        return {"text": reply.content, "told": told, "pid": os.getpid()}

    def score(self, task, result):
        right = result.output["told"] == [8, str(task.hidden["answer"])]
        return Score(reward=float(right and result.output["pid"] != os.getpid()))

    @asynccontextmanager
    async def services(self):
        async def double(arguments, caller):
            return 2 * arguments["of"]
        yield {"double": double}

    @tool(on_server=True)
    async def answer(self, caller: Caller) -> str:
        'Returns the answer.'
        return str(caller.task.hidden["answer"])

    async def on_request(self, call):
        question = {"role": "user", "content": call.caller.task.public["question"]}
        call.change("the question", messages=[question])
"""


@pytest.mark.thorough
def test_services_tools_and_hooks_run_in_an_own_interpreter(tmp_path: Path) -> None:
    code = PLAIN.replace("import itertools", "import itertools, os, sys", 1)
    imports = "from contextlib import asynccontextmanager\nfrom envserver import Caller, tool\n"
    code = code.replace("    def score_group", SERVED + "\n    def score_group", 1)
    path = sums(tmp_path, code=imports + code)
    run("env", "install", path, "--interpreter", "own", folder=tmp_path)
    words = ["process", "--env", "sums", "--model", "sim", "--out", "out.jsonl"]
    run(*words, "--env.total_steps", 2, "--env.group_size", 2, folder=tmp_path)
    groups = [line["envserver"] for line in read_jsonl(tmp_path / "out.jsonl")]
    rollouts = [one for group in groups for one in group["rollouts"]]
    assert [one["reward"] for one in rollouts] == [1.0] * 4
    assert all(one["hooks"][0]["reason"] == "the question" for one in rollouts)
    # Under the debugger all runs in that interpreter, so that prints are shown.
    words = ["run", "--env", "sums", "--task", "sum-1", "--model", "sim", "--debug"]
    shown = run(*words, folder=tmp_path)
    assert f"rollout in {tmp_path}" in shown and "my-sums/venv" in shown


@pytest.mark.thorough
def test_tasks_go_on_in_a_new_process_when_theirs_dies(tmp_path: Path) -> None:
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
    path = sums(tmp_path, code=code)
    run("env", "install", path, "--interpreter", "own", folder=tmp_path)
    registry.find.cache_clear()
    kind = registry.find("sums")
    environment = kind(kind.Config.model_validate({"largest": 7}))
    assert environment.config.max_turns == 8  # which its own Config derives
    tasks = list(itertools.islice(environment.tasks("train"), 100))
    assert [task.id for task in tasks] == [f"sum-{index}" for index in range(100)]
    assert died.exists()
    next(tmp_path.rglob("venv/bin/python")).unlink()  # as after an upgrade of Python
    registry.find.cache_clear()
    with pytest.raises(ConfigError, match="was installed for Python"):
        registry.find("sums")


@pytest.mark.slow
def test_an_older_pydantic_runs_beside_math(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    older = "pydantic==2.9.2"
    command = [sys.executable, "-m", "pip", "download", older, "--dest", str(tmp_path / "got")]
    if subprocess.run(command, check=False, capture_output=True, timeout=PATIENCE).returncode:
        pytest.skip(f"pip cannot download {older} here")
    number = 'float(pydantic.VERSION.partition(".")[2])'
    code = CODE.format(imports="import pydantic", version="pydantic.VERSION", number=number)
    project = tmp_path / "project"
    (project / "my_sums").mkdir(parents=True)
    (project / "my_sums" / "__init__.py").write_text(code)
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        f'[project]\nname = "my-sums"\nversion = "2.0"\ndependencies = ["envserver", "{older}"]\n'
        '[project.entry-points."envserver.environments"]\nsums = "my_sums:Sums"\n'
    )
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com", "-C", str(project)]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "sums"]):
        subprocess.run([*git, *words], check=True)
    run("env", "install", f"git+file://{project}", folder=tmp_path)
    check_mix(tmp_path, 9.2)
    run("env", "install", project, "--replace", "true", folder=tmp_path)
    assert "my-sums  2.0      own venv" in run("env", "list", folder=tmp_path)


def check_mix(folder: Path, version: float) -> None:
    """Tasks, rollouts, scores and group scores of `sums` see their own library."""
    settings = {"env.total_steps": 6, "env.group_size": 2, "env.ensure_scores_are_not_same": False}
    flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
    words = ["process", "--env", "math=1,sums=1", "--model", "sim", "--out", "out.jsonl", *flags]
    run(*words, folder=folder)
    groups = [line["envserver"] for line in read_jsonl(folder / "out.jsonl")]
    assert sorted(one["env"] for one in groups) == ["math"] * 3 + ["sums"] * 3
    for one in groups:
        if one["env"] == "sums":
            for rollout in one["rollouts"]:
                expected = {"same": 1.0, "version": version, "in_group": version}
                assert rollout["metrics"].items() >= expected.items()


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    words = ["env", "push", project(tmp_path), "--to", "me/sums"]
    ended = envserver(*words, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    names = ["README.md", "environment.yaml", "my_sums/__init__.py", "pyproject.toml"]
    assert ended.stdout.split() == [f"hf://datasets/me/sums/{name}" for name in names]
    assert "nothing was uploaded of sums 1.0" in ended.stderr
    assert (tmp_path / "project" / "README.md").read_text() == "# Sums\n"


def test_push_refuses_what_nobody_should_use(tmp_path: Path) -> None:
    words = ["env", "push", tmp_path / "project", "--to", "me/sums", "--dry-run"]
    for manifest, reason in (
        (MANIFEST.replace("determinism", "determinsm"), "unknown field `determinsm`"),
        (MANIFEST.replace("data_sources: [made by the program]\n", ""), "has no data_sources"),
        (MANIFEST.replace("README.md", "CARD.md"), "'CARD.md' is not a file of the project"),
        (f"{MANIFEST}licence: GPL-3.0-only\n", "but the package says 'MIT'"),
    ):
        project(tmp_path, manifest)
        assert reason in refused(*words, folder=tmp_path)
    project(tmp_path)
    (tmp_path / "project" / "server.pem").touch()
    assert "server.pem looks like a key" in refused(*words, folder=tmp_path)
    assert "not a name on the hub" in refused(*words[:-2], "sums", folder=tmp_path)


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
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    assert "my-sums  1.0      shared" in run("env", "list", folder=tmp_path)
