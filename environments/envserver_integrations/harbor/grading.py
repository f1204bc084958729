"""Runs a task's tests on a workspace, in a fresh sandbox, and reads the reward that they write. A
missing or unreadable reward says nothing about the workspace: the score is an error."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import re
import shlex
import tarfile
import tomllib
import zlib
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from envserver_environments.swe.repositories import entry_of
from envserver_environments.swe.trees import Entry, Tree, tar_of, tree_of_tar
from envserver_records.tasks import Json
from msgspec import structs

from envserver import ExecResult, InputError, Sandbox, SandboxError, Sandboxes, SandboxSpec, Score

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
    """One task."""

    name: str
    instruction: str
    workdir: str  # the container's
    image: str  # "" if the task names none
    needs_image: str  # why; "" if it does not
    tree: Tree  # what the Dockerfile copies into the working directory
    tests: Tree  # files of `tests/`
    solution: Tree  # files of `solution/`
    env: dict[str, str] = field(default_factory=dict)  # of all programs
    test_env: dict[str, str] = field(default_factory=dict)  # of the tests only
    test_seconds: float = 600.0  # time limit of the tests


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
        raise InputError(f"{folder.name}: tests in another container are not supported.")
    for name in _NOT_HERE:
        if environment.get(name):
            raise InputError(f"{folder.name}: environment.{name} is not supported.")
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
        solution={path: moved.entry(file) for path, file in _files(folder / "solution").items()},
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


def _environment(folder: Path, facts: Json) -> tuple[str, str, Tree, dict[str, str], str]:
    """Image, working directory, files, variables, and why an image is needed ("": it is not)."""
    image, workdir, needs = str(facts.get("docker_image") or ""), _WORKDIR, ""
    env, tree = _variables(facts), Tree()
    dockerfile = folder / "Dockerfile"
    lines = _lines(dockerfile) if dockerfile.is_file() else []
    for word, rest in lines:
        match word:
            case "WORKDIR":
                workdir = str(PurePosixPath(workdir) / rest.strip())
            case "ENV" if "=" in rest:
                env = dict(assignment.partition("=")[::2] for assignment in shlex.split(rest)) | env
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
            named = _files(path) if path.is_dir() else {"": entry_of(path)}
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
    return {path.relative_to(folder).as_posix(): entry_of(path) for path in paths}


def _table(facts: Json, name: str) -> Json:
    value = facts.get(name)
    return value if isinstance(value, dict) else {}


def _variables(table: Json) -> dict[str, str]:
    return {name: str(value) for name, value in _table(table, "env").items()}


def _seconds(table: Json) -> float | None:
    value = table.get("timeout_sec")
    return float(value) if isinstance(value, int | float) and value > 0 else None


_REWARD = f"{LOGS}/verifier/reward"
_MOST_BYTES = 1 << 20
_LINK = """
import json, os, sys

for path, target in json.load(sys.stdin).items():
    path = os.path.join("/work", path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.symlink(target, path)
"""


async def grade(workspace: Tree, tests: Tree, sandboxes: Sandboxes, spec: SandboxSpec) -> Score:
    placed = {f"{TESTS}/{path}": entry for path, entry in tests.items()}
    placed |= {f"{LOGS}/{name}/.keep": Entry(b"") for name in ("verifier", "agent", "artifacts")}
    # A sandbox unpacks no links that lead out of it, such as those of a virtual environment.
    links = {path: entry.data.decode() for path, entry in workspace.items() if entry.kind == "link"}
    files = {path: entry for path, entry in workspace.items() if path not in links}
    spec = structs.replace(spec, archive=tar_of({**files, **placed}))
    async with sandboxes.open(spec) as sandbox:
        if links:
            linked = await sandbox.run_python(_LINK, stdin=json.dumps(links).encode())
            if not linked.ok:
                said = linked.stderr[-300:].decode("utf-8", "replace")
                raise SandboxError(f"The workspace's links cannot be made: {said}")
        ran = await sandbox.exec(["bash", f"/work/{TESTS}/test.sh"])
        for ending, read in ((".json", _of_json), (".txt", _of_text)):
            try:
                written = await sandbox.read(_REWARD + ending, _MOST_BYTES)
            except InputError:
                continue
            return read(written)
        return Score(reward=None, error=f"The tests wrote no reward: {await _ending(ran, sandbox)}")


def _of_json(written: bytes) -> Score:
    """A number, or numbers by name: `reward` among them is the reward and the others are metrics;
    without it, it is their mean."""
    try:
        value = json.loads(written)
    except ValueError:
        return _unreadable("reward.json")
    named = value if isinstance(value, dict) else {"reward": value}
    numbers = {str(name): _number(number) for name, number in named.items()}
    known = {name: number for name, number in numbers.items() if number is not None}
    if not known or len(known) < len(numbers):
        return _unreadable("reward.json")
    if "reward" in known:
        reward = known.pop("reward")
        return Score(reward=reward, metrics=known)
    return Score(reward=sum(known.values()) / len(known), components=known)


def _of_text(written: bytes) -> Score:
    try:
        reward = _number(float(written.decode().strip()))
    except ValueError:
        reward = None
    return _unreadable("reward.txt") if reward is None else Score(reward=reward)


def _number(value: Any) -> float | None:
    is_number = type(value) in (int, float) and math.isfinite(value)
    return float(value) if is_number else None


def _unreadable(name: str) -> Score:
    return Score(reward=None, error=f"{name} of the tests is not a finite number, or numbers.")


async def _ending(ran: ExecResult, sandbox: Sandbox) -> str:
    said = (ran.stderr or ran.stdout)[-300:].decode("utf-8", "replace").strip()
    return f"test.sh ended with {ran.killed_by or ran.exit} in {sandbox.isolation}. {said}"


MOST_CHANGED = 5 << 20
"""Maximum bytes of all changed files, compressed: a rollout's output is bounded."""
_MOST_UNPACKED = 128 << 20
_PIECE = 900_000
_CHANGES = """
import errno, hashlib, json, os, shutil, sys, tarfile

base, place, top = json.load(sys.stdin), sys.argv[1], "/work"
os.chdir(top)
shutil.rmtree(place, ignore_errors=True)
if os.path.lexists(place):
    os.unlink(place)
seen, changed = set(), []
for folder, folders, files in os.walk("."):
    for name in files + [name for name in folders if os.path.islink(os.path.join(folder, name))]:
        path = os.path.normpath(os.path.join(folder, name))
        if os.path.islink(path):
            digest = "link " + os.readlink(path)
        elif os.path.isfile(path):
            try:
                with open(path, "rb") as file:
                    digest = hashlib.sha256(file.read()).hexdigest()
            except PermissionError:  # the agent took the rights away
                continue
            digest += " x" if os.stat(path).st_mode & 0o100 else ""
        else:
            continue
        seen.add(path)
        if base.get(path) != digest:
            changed.append(path)
try:
    os.mkdir(place)
    with tarfile.open(place + "/changes", "w:gz") as tar:
        for path in sorted(changed):
            tar.inodes.clear()  # two names of one file are two files
            tar.add(path, recursive=False)
except OSError as error:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        raise
    print(json.dumps({"too_large": sum(os.lstat(path).st_size for path in changed)}))
    sys.exit()  # the agent has filled the disk
print(json.dumps(sorted(set(base) - seen)))
"""


async def changes_in(sandbox: Sandbox, base: Tree) -> Json:
    """What differs from `base`: `{"deleted": [path], "changed": [base64]}`, or `{"too_large":
    bytes}`."""
    known = {path: _digest(entry) for path, entry in base.items()}
    ran = await sandbox.run_python(_CHANGES, argv=[PLACE], stdin=json.dumps(known).encode())
    if not ran.ok:
        said = ran.stderr[-300:].decode("utf-8", "replace")
        raise SandboxError(f"The workspace could not be read: {said}")
    deleted = json.loads(ran.stdout)
    if isinstance(deleted, dict):
        return deleted
    data = await sandbox.read(f"{PLACE}/changes", MOST_CHANGED + 1)
    if len(data) > MOST_CHANGED:
        return {"too_large": len(data)}
    text = base64.b64encode(data).decode()
    pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
    return {"deleted": deleted, "changed": pieces}


def changed(base: Tree, output: Any) -> Tree | None:
    """Returns the files of the workspace after the rollout; None: `output` does not say them."""
    if not isinstance(output, dict) or not isinstance(output.get("changed"), list):
        return None
    try:
        data = base64.b64decode("".join(output["changed"]), validate=True)
        unpacked = zlib.decompressobj(31).decompress(data, _MOST_UNPACKED)
        new = tree_of_tar(unpacked)
    except (TypeError, binascii.Error, zlib.error, tarfile.TarError):
        return None
    deleted = output.get("deleted")
    gone = {str(path) for path in deleted} if isinstance(deleted, list) else set()
    kept = {path: entry for path, entry in base.items() if path not in gone}
    return kept | {path: entry for path, entry in new.items() if _is_inside(path)}


def _is_inside(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return bool(parts) and parts[0] not in ("/", PLACE) and ".." not in parts


def _digest(entry: Entry) -> str:
    if entry.kind == "link":
        return f"link {entry.data.decode()}"
    return hashlib.sha256(entry.data).hexdigest() + (" x" if entry.kind == "program" else "")
