"""Runs a task's tests on a workspace, in a fresh sandbox, and reads the reward that they write.

A missing or unreadable reward says nothing about the workspace: the score has no reward, and an
error.
"""

from __future__ import annotations

import json
import math
from typing import Any

from envserver_environments.swe.trees import Entry, Tree, tar_of
from msgspec import structs

from envserver import ExecResult, InputError, Sandbox, SandboxError, Sandboxes, SandboxSpec, Score

from .folders import LOGS, TESTS

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
