"""However envserver is installed, no program sees its graders and their data.

Each way of installing gets a small environment of its own, with wheels that are built once; the
libraries come from the environment of these tests. Backends that this machine lacks are skipped. A
program of each sandbox looks for the graders, whatever the probe says.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest

from envserver.sandbox import selection

ROOT = Path(__file__).parents[2]
LIBRARIES = Path(orjson.__file__).parents[1]
UV = Path(sys.prefix, "bin", "uv")

LOOK = """
import importlib, json, sys
places, files, site_is_shown = json.loads(sys.argv[1])
for name in ("envserver_environments", "envserver_tools", "envserver_clients", "graders"):
    try:
        print(importlib.import_module(name))
    except (ImportError, OSError):
        continue
if site_is_shown:
    import fine
for place in (*sys.path, *places):
    for twin in {place, place.replace("/lib/", "/lib64/"), place.replace("/lib64/", "/lib/")}:
        for name in files:
            try:
                open(f"{twin}/{name}", "rb").read(1)
            except OSError:
                continue
            print(f"{twin}/{name}")
"""

ASK = """
import asyncio, importlib.util, json, sys
from pathlib import Path
from envserver import ConfigError, SandboxConfig, SandboxSpec
from envserver.sandbox import SandboxClient, SandboxService
place = Path(importlib.util.find_spec("envserver_environments").origin).parent
data = [path for path in place.rglob("*") if path.suffix in (".jsonl", ".txt")]
files = [str(path.relative_to(place.parent)) for path in (*data, place / "swe/grading.py")]
facts = json.dumps([[str(place.parent)], files, sys.prefix != sys.base_prefix])
async def seen(backend, look):
    try:
        async with (
            SandboxService(SandboxConfig(backend=backend)) as service,
            SandboxClient(service.address) as client,
            client.open(SandboxSpec()) as sandbox,
        ):
            cold = await sandbox.exec(["python3", "-c", look, facts])
            warm = await sandbox.run_python(look, argv=[facts])
            return [(cold.stdout + warm.stdout + cold.stderr).decode(), len(files)]
    except ConfigError as error:
        return [error.message, -1]
print(json.dumps(asyncio.run(seen(*sys.argv[1:]))))
"""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder that every user can read, as sandboxes of a root server need it."""
    place = Path(tempfile.mkdtemp(prefix="installed-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def wheels(folder: Path) -> list[str]:
    for project in (ROOT, ROOT / "clients"):
        build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory"]
        _run(*build, folder, cwd=project)
    return [str(path) for path in folder.glob("*.whl")]


def base_python() -> str:
    """Python without an environment; one that all users may execute."""
    name = f"bin/python3.{sys.version_info.minor}"
    candidates = (f"{sys.base_prefix}/{name}", f"/usr/{name}")
    for path in map(os.path.realpath, candidates):
        open_to_all = all(parent.stat().st_mode & 1 for parent in Path(path).parents)
        if Path(path).exists() and open_to_all:
            return path
    pytest.skip("every Python is in a closed folder")


def in_venv(folder: Path, wheels: list[str]) -> tuple[Path, dict[str, str]]:
    python = folder / "standard/bin/python"
    _run(base_python(), "-m", "venv", "--without-pip", folder / "standard")
    _pip(python, "--no-index", *wheels)
    return python, {}


def in_venv_of_uv(folder: Path, wheels: list[str]) -> tuple[Path, dict[str, str]]:
    if not UV.exists():
        pytest.skip("no uv")
    python = folder / "made-by-uv/bin/python"
    _run(UV, "venv", "--quiet", "--offline", "--python", base_python(), folder / "made-by-uv")
    install = [UV, "pip", "install", "--quiet", "--offline", "--no-deps", "--python", python]
    _run(*install, *wheels)
    return python, {}


def editable(folder: Path, wheels: list[str]) -> tuple[Path, dict[str, str]]:
    python = folder / "editable/bin/python"
    _run(base_python(), "-m", "venv", "--without-pip", folder / "editable")
    _libraries(folder / "editable")
    for project in (ROOT, ROOT / "clients"):
        _pip(python, "--no-build-isolation", "--editable", project)
    return python, {}


def for_the_user(folder: Path, wheels: list[str]) -> tuple[Path, dict[str, str]]:
    variables = {"PYTHONUSERBASE": str(folder / "user")}
    python = Path(base_python())
    _pip(python, "--no-index", "--break-system-packages", "--user", *wheels, env=variables)
    return python, variables


Install = Callable[[Path, list[str]], tuple[Path, dict[str, str]]]


@pytest.mark.thorough
@pytest.mark.parametrize("install", [in_venv, in_venv_of_uv, editable, for_the_user])
def test_no_program_sees_the_graders(install: Install, folder: Path, wheels: list[str]) -> None:
    python, variables = install(folder, wheels)
    _libraries(python.parents[1] if not variables else folder / "user")
    refused = {}
    for backend in selection.ORDER:
        told = _run(python, "-c", ASK, backend, LOOK, env=variables, cwd=folder)
        seen, tries = orjson.loads(told.splitlines()[-1])
        if tries < 0:
            refused[backend] = seen
            assert "graders" not in seen, "the view of programs is wrong, not the machine"
        else:
            assert tries > 20
            assert seen == "", backend
    if len(refused) == len(selection.ORDER):
        pytest.skip(f"no backend works here: {refused}")


def _pip(python: Path, *words: object, env: dict[str, str] | None = None) -> None:
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-compile",
    ]
    _run(*pip, "--no-warn-script-location", *words, env=env)


def _libraries(prefix: Path) -> None:
    (site,) = prefix.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(f"{LIBRARIES}\n")
    (site / "fine.py").touch()
    (site / "graders.py").touch()
    info = site / "graders-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: graders\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[envserver.environments]\nx = graders:X\n")
    (info / "RECORD").write_text("graders.py,,\ngraders-1.0.dist-info/METADATA,,\n")


def _run(*words: object, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    ended = subprocess.run(
        list(map(str, words)),
        env={**os.environ, **(env or {})},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
