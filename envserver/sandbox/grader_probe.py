"""Tries to read graders and data of environments from a sandbox; no backend may allow it.

In: a sandbox, and the paths of environments that are not installed. Out: modules and files that a
program could import or open. What always holds: every installed environment is tried, by its
absolute path and below every directory that Python imports from there.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from envserver_records.records import ExecResult

from ..sandbox_interface import Sandbox
from .hidden import OUR_PACKAGES, environment_packages, package_places
from .system import shown_roots

_MOST_FILES = 2000
"""Files tried in each package or folder, so that a large data set does not delay the start."""
_FACTS = "probe-facts.json"

_LOOK = f"""
import importlib, json, sys
facts = json.load(open({_FACTS!r}))
seen = []
for name in facts["modules"]:
    try:
        if importlib.import_module(name).__file__ is None:
            continue  # a namespace package: the name of a folder whose modules cannot be read
    except (ImportError, OSError):  # some backends show names of files that cannot be read
        continue
    except Exception:
        pass
    seen.append(f"import {{name}}")
for entry in sys.path:
    twins = entry, entry.replace("/lib/", "/lib64/"), entry.replace("/lib64/", "/lib/")
    facts["files"] += [f"{{twin}}/{{name}}" for twin in twins for name in facts["packaged"]]
for path in dict.fromkeys(facts["files"]):
    try:
        with open(path, "rb") as file:
            file.read(1)
    except (OSError, ValueError):
        continue
    seen.append(path)
print(json.dumps(seen[:5]))
"""


async def visible_graders(sandbox: Sandbox, private: Sequence[str]) -> tuple[ExecResult, list[str]]:
    """Looks for environments in `sandbox`, from a new Python and from the warm one.

    Args:
        private: paths of environments and data that are not installed.

    Returns:
        The last program's result, and what was visible, at most ten things. If a program failed,
        its result tells why.
    """
    packages = {name: package_places(name) for name in environment_packages()}
    facts = {
        "modules": list(packages),
        "packaged": [name for places in packages.values() for name in _relative(places)],
        "files": [path for place in _all(packages, private) for path in _files(place)],
    }
    await sandbox.write(_FACTS, json.dumps(facts).encode())
    warm = await sandbox.run_python(_LOOK)
    if not warm.ok:
        return warm, []
    facts["modules"] = [*OUR_PACKAGES, *packages]  # the warm one has modules of ours in memory
    await sandbox.write(_FACTS, json.dumps(facts).encode())
    cold = await sandbox.exec(["python3", "-c", _LOOK])
    return cold, [thing for each in (warm, cold) if each.ok for thing in json.loads(each.stdout)]


def _all(packages: dict[str, set[str]], private: Sequence[str]) -> list[str]:
    return [*(place for places in packages.values() for place in places), *private]


def _relative(places: set[str]) -> Iterator[str]:
    """Yields the files of a package, from the directory that it is imported from."""
    for place in places:
        for path in _files(place):
            yield str(Path(path).relative_to(Path(place).parent))


def _files(place: str) -> list[str]:
    """Returns the files in a folder, except for those of a Python in it; or the file itself."""
    if Path(place).is_file():
        return [place]
    return list(itertools.islice(_walk(place, shown_roots()), _MOST_FILES))


def _walk(folder: str, shown: set[str]) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        if parent in shown:
            folders.clear()
            continue
        folders[:] = [name for name in folders if name not in ("__pycache__", ".git")]
        yield from (f"{parent}/{name}" for name in names)
