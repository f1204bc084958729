"""The folders and virtual environments of what `envserver env install` installs.

What always holds: nothing that envserver's own interpreter has is changed, and a package's folder
is there wholly or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import msgspec
from envserver_records.errors import ConfigError

from ..registry.description import Description
from ..registry.installed import VENV, Interpreter, home, this_version
from ..registry.integrated import INTEGRATIONS
from ..registry.interpreters import variables

_OURS = ("envserver", "envserver-clients")
_DESCRIBE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from envserver.registry.description import main; main(*sys.argv[2:])"
)
_LAST_LINES = 12


@contextmanager
def folder_of(package: str) -> Iterator[Path]:
    """Makes the package's folder anew; it is gone if the block raises."""
    place = home() / package
    shutil.rmtree(place, ignore_errors=True)  # of a replaced package, or one that was cut off
    place.mkdir(parents=True)
    try:
        yield place
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise


def make_venv(place: Path) -> Interpreter:
    """Makes a virtual environment in `place`, which takes envserver as installed."""
    folder = place / VENV
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    asked = subprocess.run(
        [python, "-I", "-c", "import json, sys; print(json.dumps(sys.path))"],
        check=True,
        capture_output=True,
    )
    own_path = list(filter(None, json.loads(asked.stdout)))
    _claim_ours(next(Path(entry) for entry in own_path if entry.endswith("site-packages")))
    return Interpreter(executable=str(python), own_path=own_path, version=this_version())


def _claim_ours(site: Path) -> None:
    """Makes pip take envserver as installed and without dependencies: it comes from here.

    Its optional dependencies (`envserver[math]`) stay.
    """
    for name in _OURS:
        held = distribution(name)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {held.version}"]
        lines += [f"Provides-Extra: {one}" for one in held.metadata.get_all("Provides-Extra") or []]
        lines += [f"Requires-Dist: {one}" for one in held.requires or [] if "extra ==" in one]
        info = site / f"{name.replace('-', '_')}-{held.version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        # This claim hides the true distribution there, and the integrations that it offers.
        points = [
            f"{one.name} = {one.value}" for one in held.entry_points.select(group=INTEGRATIONS)
        ]
        (info / "entry_points.txt").write_text("\n".join([f"[{INTEGRATIONS}]", *points]) + "\n")


def describe(
    references: Sequence[str], python: str, path: Sequence[str], place: Path, failure: str
) -> list[Description]:
    """Imports environments in a process of `python` with `sys.path` `path`.

    Args:
        references: as `--env` takes them.
        place: a folder for its answer.
        failure: what is said first if one cannot be imported.

    Raises:
        ConfigError: one cannot be imported.
    """
    out = place / "described.json"
    words = [python, "-P", "-c", _DESCRIBE, json.dumps(list(path)), str(out), *references]
    run(words, failure)
    data: Any = json.loads(out.read_text())
    out.unlink()
    return msgspec.convert(data, list[Description])


def pip(*words: str | Path, failure: str) -> None:
    """Runs pip; see `run`."""
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", *words]
    run(list(map(str, command)), failure)


def run(words: list[str], failure: str) -> None:
    """Runs a program without the server's settings: building a package runs foreign code.
    Raises ConfigError: it fails; the message has the end of its output.
    """
    ended = subprocess.run(
        words,
        env=variables(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ended.returncode != 0:
        lines = "\n".join(ended.stdout.strip().splitlines()[-_LAST_LINES:])
        raise ConfigError(f"{failure}:\n{lines}")
