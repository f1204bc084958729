"""Reads task folders: `task.toml`, `instruction.md`, `tests/test.sh`, `environment/Dockerfile`.

In: a folder. Out: a HarborTask. Paths of the task's container become paths of a sandbox: its
working directory is /work, /tests and /logs lie in /work/.harbor.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from envserver_environments.swe.trees import Entry, Tree

from envserver import InputError

PLACE = ".harbor"
"""Folder of the workspace for tests and their reports; nothing of the agent's is in it."""
TESTS, LOGS = f"{PLACE}/tests", f"{PLACE}/logs"
MOST_BYTES = 56 << 20
_WORKDIR = "/app"
_IGNORED = ("CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "SHELL", "STOPSIGNAL", "USER")
_FETCHES = re.compile(
    r"\b(?:apt-get|apt|apk|dnf|yum|curl|wget|uvx|uv|npm|npx|conda|git clone|pip3? install)\b"
)
_NOT_HERE = ("healthcheck", "docker_compose", "mcp_servers")


@dataclass(frozen=True)
class HarborTask:
    """One task.

    Args:
        workdir: the container's working directory.
        image: the container image, "" if the task names none.
        tree: what the Dockerfile copies into the working directory.
        needs_image: why the task needs an image; "" if it does not.
        tests, solution: files of `tests/` and `solution/`.
        env, test_env: variables of all programs, and of the tests only.
        test_seconds: time limit of the tests.
    """

    name: str
    instruction: str
    workdir: str
    image: str
    needs_image: str
    tree: Tree
    tests: Tree
    solution: Tree
    env: dict[str, str] = field(default_factory=dict)
    test_env: dict[str, str] = field(default_factory=dict)
    test_seconds: float = 600.0


def task_folders(folder: Path) -> list[Path]:
    """Returns the task folders at or directly below `folder`, sorted by name."""
    if (folder / "task.toml").is_file():
        return [folder]
    return sorted(path.parent for path in folder.glob("*/task.toml"))


def read_task(folder: Path) -> HarborTask:
    """Raises InputError: the folder is not a task that can be run here."""
    try:
        facts = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        instruction = (folder / "instruction.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{folder.name} is not a readable task: {error}") from error
    environment, verifier = _table(facts, "environment"), _table(facts, "verifier")
    if verifier.get("environment_mode", "shared") != "shared" or verifier.get("collect"):
        raise InputError(f"{folder.name}: tests in another container are not possible here.")
    for name in _NOT_HERE:
        if environment.get(name):
            raise InputError(f"{folder.name}: environment.{name} is not possible here.")
    _check_links(folder)
    tests = _files(folder / "tests")
    if "test.sh" not in tests:
        raise InputError(f"{folder.name} has no tests/test.sh.")
    try:
        image, workdir, tree, env, needs = _environment(folder / "environment", environment)
    except (ValueError, OSError) as error:
        raise InputError(f"The Dockerfile of {folder.name} cannot be read: {error}") from error
    moved = _Moved(workdir)
    return HarborTask(
        name=folder.name,
        instruction=moved.text(instruction),
        workdir=workdir,
        image=image,
        needs_image=needs,
        tree=tree,
        tests={path: moved.entry(entry) for path, entry in tests.items()},
        solution={path: moved.entry(one) for path, one in _files(folder / "solution").items()},
        env={name: moved.text(value) for name, value in env.items()},
        test_env={name: moved.text(value) for name, value in _variables(verifier).items()},
        test_seconds=_seconds(verifier) or 600.0,
    )


def fetches(tests: Tree) -> str:
    """Returns the first command of `test.sh` that needs a network, or ""."""
    script = tests["test.sh"].data.decode("utf-8", "replace")
    lines = (line for line in script.splitlines() if not line.lstrip().startswith("#"))
    return next((found[0] for line in lines if (found := _FETCHES.search(line))), "")


class _Moved:
    """Rewrites the container's paths in texts."""

    def __init__(self, workdir: str) -> None:
        places = {"/tests": f"/work/{TESTS}", "/logs": f"/work/{LOGS}", workdir: "/work"}
        self._places = places
        names = "|".join(map(re.escape, places))
        self._pattern = re.compile(rf"(?<![\w./-])(?:{names})(?![\w-])")

    def text(self, text: str) -> str:
        return self._pattern.sub(lambda found: self._places[found[0]], text)

    def entry(self, entry: Entry) -> Entry:
        try:
            return Entry(self.text(entry.data.decode()).encode(), entry.kind)
        except UnicodeDecodeError:
            return entry


def _environment(folder: Path, facts: dict[str, Any]) -> tuple[str, str, Tree, dict[str, str], str]:
    """Returns image, working directory, files, variables, and why an image is needed ("": it is
    not)."""
    image, workdir, needs = str(facts.get("docker_image") or ""), _WORKDIR, ""
    env, tree = _variables(facts), Tree()
    dockerfile = folder / "Dockerfile"
    lines = _lines(dockerfile) if dockerfile.is_file() else []
    for word, rest in lines:
        match word:
            case "WORKDIR":
                workdir = str(PurePosixPath(workdir) / rest.strip())
            case "ENV" if "=" in rest:
                env = dict(one.partition("=")[::2] for one in shlex.split(rest)) | env
            case "FROM" | "ARG":
                continue
            case "COPY" | "ADD" if not needs:
                needs = _copied(tree, folder, workdir, rest)
            case _ if word not in _IGNORED:
                needs = needs or f"its Dockerfile has {word}"
    if workdir == "/":
        needs = needs or "its working directory is /"
    return image, workdir, tree, env, needs


def _lines(dockerfile: Path) -> list[tuple[str, str]]:
    text = re.sub(r"^\s*#.*\n", "", dockerfile.read_text(encoding="utf-8"), flags=re.M)
    whole = re.sub(r"\\\s*\n", " ", text)
    parts = (line.strip().partition(" ") for line in whole.splitlines() if line.strip())
    return [(word.upper(), rest.strip()) for word, _, rest in parts]


def _copied(tree: Tree, folder: Path, workdir: str, rest: str) -> str:
    words = [*map(str, json.loads(rest))] if rest.startswith("[") else shlex.split(rest)
    if len(words) < 2 or any(word.startswith("--from") for word in words):
        return "its Dockerfile copies from another image"
    *sources, target = [word for word in words if not word.startswith("--")]
    place = PurePosixPath(workdir) / target
    if not place.is_relative_to(workdir) or ".." in place.parts:
        return f"its Dockerfile copies to {target}"
    below = place.relative_to(workdir)
    into = len(sources) > 1 or target.endswith(("/", ".")) or str(below) == "."
    for source in sources:
        if ".." in PurePosixPath(source).parts:
            return f"its Dockerfile copies {source}"
        found = sorted(folder.glob(source.lstrip("/").removeprefix("./") or "*"))
        if source in (".", "./"):
            found = sorted(path for path in folder.iterdir() if path.name != "Dockerfile")
        for path in found:
            if not (path.is_file() or path.is_dir()):
                continue
            keep_name = path.is_file() or source in (".", "./")
            at = below / path.name if into and keep_name else below
            files = {"": path} if path.is_file() else {}
            named = _files(path) if path.is_dir() else {"": _entry(files[""])}
            tree.update({str(at / name): entry for name, entry in named.items()})
    return ""


def _check_links(folder: Path) -> None:
    top = folder.resolve()
    for path in folder.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(top):
            raise InputError(f"{folder.name}: the link {path.relative_to(folder)} leads out of it.")


def _files(folder: Path) -> Tree:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    if sum(path.stat().st_size for path in paths) > MOST_BYTES:
        raise InputError(f"{folder} is larger than {MOST_BYTES >> 20} MB.")
    return {path.relative_to(folder).as_posix(): _entry(path) for path in paths}


def _entry(path: Path) -> Entry:
    return Entry(path.read_bytes(), "program" if path.stat().st_mode & 0o100 else "file")


def _table(facts: dict[str, Any], name: str) -> dict[str, Any]:
    value = facts.get(name)
    return value if isinstance(value, dict) else {}


def _variables(table: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in _table(table, "env").items()}


def _seconds(table: dict[str, Any]) -> float | None:
    value = table.get("timeout_sec")
    return float(value) if isinstance(value, int | float) and value > 0 else None
