"""Installed backends of other frameworks, as `envserver env install` leaves them.

Each is a Python that has the framework already: nothing is fetched.
"""

import json
import subprocess
from pathlib import Path

from envserver.registry.installed import Installed, Interpreter, home, this_version, write_record
from envserver.running.installing import describe


def install(python: Path, package: str, *references: str) -> None:
    """Makes environments known below XDG_DATA_HOME that run in `python`.

    Raises:
        ConfigError: one cannot be imported there.
    """
    asked = [python, "-I", "-c", "import json, sys; print(json.dumps(sys.path))"]
    path = list(filter(None, json.loads(subprocess.check_output(asked))))
    interpreter = Interpreter(executable=str(python), own_path=path, version=this_version())
    place = home() / package
    place.mkdir(parents=True, exist_ok=True)
    record = Installed(
        package=package,
        version="0",
        source=references[0],
        environments=describe(references, str(python), interpreter.search_path, place, package),
        interpreter=interpreter,
    )
    write_record(record)
