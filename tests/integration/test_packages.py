"""What is shipped: the packages with their data and the rules between them, the client without the
server, and names of folders that collide with nobody's.
"""

import json
import re
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from support.cases import cases_of
from support.commands import ENVSERVER, environment_variables, read_jsonl, served
from support.extent import WHOLE, first_of
from support.waiting import PATIENCE

CASES = cases_of(__file__)

ROOT = Path(__file__).parents[2]
# The folder that each package lies in, by the project that ships it.
PACKAGES = CASES["packages"]
_MAY_LACK = {"torch", "transformers", "trl", "datasets", "verl", "skyrl", "slime", "ray", "hydra"}


def program(*words: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end."""
    how = {"capture_output": True, "text": True, "timeout": PATIENCE, "check": True, **how}
    return subprocess.run(list(map(str, words)), **how)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each project, by its folder."""
    built = {}
    for project in PACKAGES:
        folder = tmp_path_factory.mktemp("wheel")
        build = (sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory")
        program(*build, folder, cwd=ROOT / project)
        (built[project],) = folder.glob("*.whl")
    return built


@pytest.mark.parametrize("project", PACKAGES)
def test_a_wheel_holds_the_files_of_its_packages(wheels: dict[str, Path], project: str) -> None:
    names = set(zipfile.ZipFile(wheels[project]).namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES[project])
    assert not [name for name in names if "__pycache__" in name or "node_modules" in name]
    assert not [name for name in names if name.endswith((".ts", ".tsx"))]
    assert ("envserver/configs/models.yaml" in names) == (project == ".")
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    for package, folder in PACKAGES[project].items():
        assert f"{package}/py.typed" in names
        tracked = program("git", "ls-files", package, cwd=ROOT / folder, check=False)
        if tracked.returncode != 0:
            pytest.skip("not a git checkout: nothing to compare the wheel with")
        files = {name for name in tracked.stdout.split() if (ROOT / folder / name).exists()}
        source = {name for name in files - names if name.startswith("envserver/dashboard/")}
        assert files - names == source
        # What the page is built from: users need no Node.js.
        assert not [name for name in source if name.endswith((".py", ".md")) or "/static/" in name]


def test_the_lock_has_hashes_and_no_addresses() -> None:
    locked = (ROOT / "constraints.txt").read_text()
    assert not re.search(r"://|^--?(?!-hash)(i|index|extra|find|f|trusted)\b", locked, re.MULTILINE)
    requirements = re.split(r"\n(?=[a-z0-9])", locked.partition("\n")[2])
    pinned = [entry for entry in requirements if "==" in entry.split("\n")[0]]
    assert len(pinned) > 40
    assert [entry.split("==")[0] for entry in pinned if "--hash=sha256:" not in entry] == []


# The client alone: a Python that has what the client's wheel requires and nothing else. It is put
# together from the packages that the tests run with, so that nothing is downloaded; `make dist`
# installs the wheel by pip.


class Alone:
    """A Python that has the client and its requirements.

    Args:
        python: its interpreter.
        packages: the distributions that the client brings, by name.
    """

    def __init__(self, python: Path, packages: dict[str, Distribution]) -> None:
        self.python = python
        self.packages = packages

    def run(self, code: str, *arguments: object) -> str:
        """Runs a program; returns what it printed."""
        words = (self.python, "-I", "-c", code, *arguments)
        ended = program(*words, env=environment_variables(), check=False)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, wheels: dict[str, Path]) -> Alone:
    folder = tmp_path_factory.mktemp("alone")
    program(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    python = folder / "venv/bin/python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index")
    program(*pip, "--quiet", wheels["clients"])
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    (installed,) = site.glob("envserver_clients-*.dist-info")
    packages = _required_by(Distribution.at(installed))
    for package in packages.values():
        for name in {path.parts[0] for path in package.files or []} - {"..", "__pycache__"}:
            (site / name).symlink_to(package.locate_file(name))
    return Alone(python, packages)


def _required_by(package: Distribution) -> dict[str, Distribution]:
    """Returns what `package` requires without extras, and what that requires."""
    found: dict[str, Distribution] = {}
    waiting = [package]
    while waiting:
        for text in waiting.pop().requires or []:
            requirement = Requirement(text)
            name = requirement.name.lower().replace("_", "-")
            needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if needed and name not in found:
                found[name] = distribution(name)
                waiting.append(found[name])
    return found


@pytest.mark.thorough
def test_the_client_brings_few_packages(alone: Alone) -> None:
    expected = {"numpy", "msgspec", "httpx", "httpcore", "h11", "certifi", "idna", "anyio"}
    # Before Python 3.13 anyio needs typing_extensions.
    assert expected <= alone.packages.keys() <= expected | {"typing-extensions"}


def test_the_client_and_its_adapters_are_importable_without_a_server(alone: Alone) -> None:
    code = """
import importlib, importlib.util, json, pkgutil
import envserver_clients
from envserver_clients import adapters
assert all(hasattr(envserver_clients, name) for name in envserver_clients.__all__)
assert importlib.util.find_spec("envserver") is None
lacks = {}
for module in pkgutil.iter_modules(adapters.__path__):
    try:
        importlib.import_module(f"envserver_clients.adapters.{module.name}")
    except ModuleNotFoundError as error:
        lacks[module.name] = error.name
print(json.dumps(lacks))
"""
    lacks: dict[str, str] = json.loads(alone.run(code))

    assert lacks.pop("trl_environments") == "envserver_tools"  # runs environments itself
    assert set(lacks.values()) <= _MAY_LACK
    assert not lacks.keys() & {"atropos", "completions", "slime"}


@pytest.mark.thorough
def test_a_trainer_leases_learns_acknowledges_and_publishes(alone: Alone, tmp_path: Path) -> None:
    trainer = CASES["trainer"]
    line = (
        "--env math --model sim --sim.latency_seconds 0 --env.group_size 2 --store groups.db"
        " --env.ensure_scores_are_not_same false"
    )
    with served(line, tmp_path) as (_, url):
        assert alone.run(trainer, url).split() == ["2", "4"]


# A folder with packages of common names hides none of ours, and none of ours hides them.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder, with packages that have the names of our folders."""
    for name, line in (
        ("tools", "TOOL = 'my tool, '"),
        ("environments", "ENVIRONMENT = 'my environment, '"),
        ("clients", "CLIENT = 'my client'"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(line + "\n")
    for place in ("mine.py", "environments/mine.py"):
        (tmp_path / place).write_text(CASES["users_environment"])
    return tmp_path


def run_in(folder: Path, *words: object, path: str = "") -> str:
    """What a program says that must succeed."""
    variables = environment_variables() | ({"PYTHONPATH": path} if path else {})
    done = program(*words, cwd=folder, env=variables, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


RUN_MATH = (
    "process --env math --model sim --env.total_steps 1 --env.ensure_scores_are_not_same false"
    " --env.data_path_to_save_groups out.jsonl"
)


@pytest.mark.parametrize(
    "place", first_of(("environments/mine.py", ""), ("mine.py", ""), ("mine.py", "."))
)
def test_an_environment_gets_the_users_packages(place: tuple[str, str], folder: Path) -> None:
    file, path = place
    line = RUN_MATH.replace("math", file).replace("--env.total_steps 1", "")
    run_in(folder, ENVSERVER, *line.split(), path=path)
    assert set(read_jsonl(folder / "out.jsonl")[0]["scores"]) == {1.0}


def test_modules_run_under_the_names_that_were_typed(folder: Path) -> None:
    """In a checkout under their short ones."""
    alias = "environments.smolagents_integration.smolagents_env"
    modules = ["environments.math", *([alias] if WHOLE else [])]
    places = [(ROOT, name) for name in modules] + [(folder, "envserver_environments.math")]
    for place, module in places:
        said = run_in(place, sys.executable, "-m", module, "--help")
        assert f"Usage: python -m {module} COMMAND" in said
