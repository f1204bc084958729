"""The outer layer of a backend, around the process that forks what runs in it.

seen = prepare(backend, private)  before imports, which may start threads
... imports ...
enter(backend, root, seen, run)   `run` in the outer layer; it sees nothing else of the machine
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from . import linux, namespaces

PLACE = namespaces.PLACE
_USERS = {"sandbox": (30000, 60000), "worker": (20000, 30000)}


def prepare(backend: str, private: Sequence[str]) -> dict[str, Any]:
    """Moves Python if a sandbox would hide it, and makes a user namespace for an ordinary user."""
    seen = _described(backend, tuple(private))
    if seen["moves"]:
        from . import system

        system.move_python()  # starts this program again
    if backend == "namespace":
        namespaces.own_users()
    os.environ.update(seen["one_thread"])
    return seen


def enter(
    backend: str, root: str, seen: dict[str, Any], run: Callable[[], None], *, shown: str = ""
) -> int:
    """Runs `run` in the outer layer of `backend`; backends without one run it here.

    `root` is an empty directory; `shown` a folder of this machine that appears at `PLACE`, read-
    only. Returns its exit status; where there is a layer, that of its first process.
    """
    if backend == "namespace":
        return namespaces.enter_outer(root, seen, run, shown)
    if backend == "bubblewrap":
        from . import bubblewrap

        return bubblewrap.enter_outer(seen, run, shown)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    run()
    return 0


def first_user(kind: str, count: int) -> int | None:
    """The first of `count` user ids for `kind` ("sandbox" or "worker"); None if not root.

    The range depends on the process id, so that servers on one machine rarely share user ids.
    """
    if os.geteuid() != 0:
        return None
    first, last = _USERS[kind]
    return first + os.getpid() * count % (last - first - count)


def _described(backend: str, private: tuple[str, ...]) -> dict[str, Any]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        from . import system

        os.close(reading)
        system.tell(backend, private, writing)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    word, seen = json.loads(text or '["error", "the process that looked ended"]')
    if word != "ok":
        raise OSError(f"Cannot determine which files programs may see: {seen}")
    return dict(seen)
