"""Runs a task's tests on a workspace, in a fresh sandbox, and reads the reward that they write.

A missing or unreadable reward says nothing about the workspace: the score has no reward, and an
error.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import tarfile
import zlib
from pathlib import PurePosixPath
from typing import Any

from envserver_environments.swe.trees import Entry, Tree, tar_of, tree_of_tar
from msgspec import structs

from envserver import ExecResult, InputError, Sandbox, SandboxError, Sandboxes, SandboxSpec, Score

from .folders import LOGS, PLACE, TESTS

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
    """Puts `tests` beside `workspace`, and runs `test.sh` once.

    Args:
        spec: limits, image and variables of the tests.
    """
    placed = {f"{TESTS}/{path}": entry for path, entry in tests.items()}
    placed |= {f"{LOGS}/{name}/.keep": Entry(b"") for name in ("verifier", "agent", "artifacts")}
    # A sandbox unpacks no links that lead out of it, such as those of a virtual environment.
    links = {path: one.data.decode() for path, one in workspace.items() if one.kind == "link"}
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
    """Returns the score of `reward.json`: a number, or numbers by name. `reward` among them is the
    reward and the others are metrics; without it, it is their mean."""
    try:
        value = json.loads(written)
    except ValueError:
        return _unreadable("reward.json")
    named = value if isinstance(value, dict) else {"reward": value}
    numbers = {str(name): _number(one) for name, one in named.items()}
    known = {name: one for name, one in numbers.items() if one is not None}
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


async def changes_in(sandbox: Sandbox, base: Tree) -> dict[str, Any]:
    """Returns what differs from `base`: `{"deleted": [path], "changed": [base64]}`, or
    `{"too_large": bytes}`.
    """
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
