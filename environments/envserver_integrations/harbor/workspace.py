"""The files that an agent changed in its workspace, as a rollout's output.

In: a sandbox, and the files that it began with. Out: JSON; `changed` gives the files again.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import tarfile
import zlib
from pathlib import PurePosixPath
from typing import Any

from envserver_environments.swe.trees import Entry, Tree, tree_of_tar

from envserver import Sandbox, SandboxError

from .folders import PLACE

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
