"""Installs environments of another framework in a virtual environment that a make target made.

`envserver env install` would download the framework; the record that it writes is the same.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from envserver.registry.installed import Installed, Interpreter, home, this_version, write_record
from envserver.running.own_venv import describe


def install_in(python: Path, package: str, references: Sequence[str]) -> None:
    """Records that the environments run in `python`; `XDG_DATA_HOME` says where.

    Raises:
        ConfigError: one cannot be imported there.
    """
    path = subprocess.check_output(
        [python, "-I", "-c", "import json, sys; print(json.dumps(sys.path))"]
    )
    own = Interpreter(
        executable=str(python.absolute()),
        own_path=[entry for entry in json.loads(path) if entry],
        version=this_version(),
    )
    place = home() / package
    place.mkdir(parents=True, exist_ok=True)
    described = describe(references, own.executable, own.search_path, place, "It cannot be used")
    write_record(
        Installed(
            package=package,
            version="0",
            source=references[0],
            environments=described,
            interpreter=own,
        )
    )
