"""`envserver init`: the package of every kind works at once, installed and in its own tests."""

import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from envserver_factory.scaffold import KINDS, create
from support.commands import envserver, read_jsonl
from support.waiting import PATIENCE

from envserver import ConfigError, ConflictError
from envserver.registry import find

OFTEN = ("single", "sandbox", "judge")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_an_environment_with_tasks(tmp_path: Path, kind: str) -> None:
    written = create("my-world", kind, tmp_path)
    words = {word for path in written for word in path.read_text().split()}
    assert not {"my_env", "MyEnv", "my-env", "{{", "{%"} & words
    project = tomllib.loads((tmp_path / "my-world/pyproject.toml").read_text())["project"]
    assert project["entry-points"]["envserver.environments"] == {"my_world": "my_world.env:MyWorld"}
    made = find(str(tmp_path / "my-world" / "my_world"))()
    tasks = list(made.tasks("train"))
    assert made.name == "my_world" and len(tasks) >= 3
    for task in tasks:
        assert made.demonstration(task)
        assert any(known.least > 0 for known in made.known_results(task))
        assert any(known.most < 1 for known in made.known_results(task))


def test_the_command_makes_a_package_that_check_finds_sound(tmp_path: Path) -> None:
    ran = envserver("init", "my-world", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "pip install -e 'my-world[test]'" in ran.stdout
    ran = envserver("check", "my-world/my_world", folder=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    with pytest.raises(ConflictError, match="my-world exists"):
        create("my-world", "tools", tmp_path)


def test_names_that_cannot_be_packages_are_refused(tmp_path: Path) -> None:
    for name in ("json", "My-Env", "a b", "../up", "-x", "1st", "class", "math"):
        with pytest.raises(ConfigError, match=r"cannot be the name|already exists"):
            create(name, "single", tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh virtual environment, which sees what is installed here."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.check_output([python, "-c", code], text=True).strip()
    here = sysconfig.get_path("purelib")
    Path(site, "here.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    return python


# Half a minute for each kind, most of it its own tests.
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.thorough if kind in OFTEN else pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_every_kind_is_installed_checked_and_run(tmp_path: Path, python: Path, kind: str) -> None:
    name = f"{kind}-world"
    (folder,) = {path.parents[1] for path in create(name, kind, tmp_path) if path.name == "env.py"}

    def ran(*words: object) -> str:
        done = subprocess.run(
            [str(python), *map(str, words)],
            cwd=tmp_path,
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        return done.stdout

    pip = ("-m", "pip", "--python", python, "install", "--quiet", "--no-deps")
    subprocess.run(
        [sys.executable, *map(str, pip), "--no-build-isolation", "-e", str(folder)], check=True
    )
    listed = [line.split()[0] for line in ran("-m", "envserver", "list").splitlines()]
    assert name.replace("-", "_") in listed
    assert "All checks passed." in ran("-m", "envserver", "check", name)
    ran(
        *("-m", "envserver", "process", "--env", name, "--model", "sim"),
        *("--sim.solve_probability", 1, "--out", "out.jsonl"),
    )
    groups = read_jsonl(tmp_path / "out.jsonl")
    assert groups and all(score == 1.0 for group in groups for score in group["scores"])
    assert "3 passed" in ran("-m", "pytest", "-q", "-p", "no:cacheprovider", folder)
