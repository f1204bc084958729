"""The outer layer of a wall, around a process that will fork what lives behind it.

prepare(wall)            before imports, which may start threads
... imports ...
enter(wall, root, run)   `run` in the outer layer; nothing of the machine is left in its sight
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from . import bubblewrap, linux, namespaces, system
from .wire import WHOLE_WALLS

_USERS = {"sandbox": (30000, 60000), "worker": (20000, 30000)}


def prepare(wall: str) -> None:
    """
    Raises:
        OSError: the kernel refused a step of it.
    """
    if wall in WHOLE_WALLS:
        system.move_python()
    if wall == "namespace":
        namespaces.own_users()
    os.environ.update(system.ONE_THREAD)


def enter(wall: str, root: str, run: Callable[[], None], *, visible: Sequence[str] = ()) -> int:
    """Runs `run` behind the outer layer of `wall` (those without one: where we are).

    Args:
        root: an empty directory.
        visible: host paths that are seen beside the system's and Python's.

    Returns:
        Its exit status; where there is a layer, that of its first process.
    """
    shown, etc = [*system.visible_paths(), *visible], system.etc_files()
    if wall == "namespace":
        return namespaces.enter_outer(root, shown, etc, run)
    if wall == "bubblewrap":
        return bubblewrap.enter_outer(shown, etc, run)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    run()
    return 0


def first_user(kind: str, count: int) -> int | None:
    """First of `count` users for the `kind` "sandbox" or "worker"; None: we are no root.

    Several servers on a machine should not share any, as far as the numbers reach.
    """
    if os.geteuid() != 0:
        return None
    first, last = _USERS[kind]
    return first + os.getpid() * count % (last - first - count)
