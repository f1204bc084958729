"""Installs envserver from wheels, and looks from inside of sandboxes for its graders."""

import os
import sys
from pathlib import Path

import orjson

from .foreign_trainers import ROOT as ROOT
from .foreign_trainers import printed

LIBRARIES = Path(orjson.__file__).parents[1]
"""What envserver needs, as installed for these tests."""

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
from envserver.sandbox.client import SandboxClient
from envserver.sandbox.service import SandboxService
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


def build_wheels(folder: Path) -> list[str]:
    """Builds the wheels of both projects into `folder`; returns their paths."""
    for project in (ROOT, ROOT / "clients"):
        build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory"]
        run(*build, folder, cwd=project)
    return [str(path) for path in folder.glob("*.whl")]


def add_libraries(site: Path, libraries: Path = LIBRARIES) -> None:
    """Adds the libraries to a folder of packages, a package of nobody's, and one with graders."""
    (site / "libraries.pth").write_text(f"{libraries}\n")
    (site / "fine.py").touch()
    (site / "graders.py").touch()
    info = site / "graders-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: graders\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[envserver.environments]\nx = graders:X\n")
    (info / "RECORD").write_text("graders.py,,\ngraders-1.0.dist-info/METADATA,,\n")


def run(*words: object, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """The standard output of a command that must succeed."""
    return printed(*words, folder=cwd, env={**os.environ, **(env or {})})
