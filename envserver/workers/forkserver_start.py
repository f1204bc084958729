"""Starts the forkserver: what must be done before it has imported much.

In: the struct `boot.Boot`, as JSON. Out: the forkserver's loop (`forkserver.main`), beside a lean
parent of companions where workers have namespaces of their own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from ..sandbox import outer
from ..sandbox.wire import NAMESPACE_BACKENDS
from . import linux
from .lean import LeanParent


def main(boot_json: str) -> None:
    """Runs the forkserver."""
    boot = json.loads(boot_json)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    linux.die_with_parent(boot["server_pid"], signal.SIGTERM)
    linux.adopt_orphans()
    sandbox = boot["sandbox"]
    seen: dict[str, Any] = {}
    lean = failure = None
    if sandbox is not None:
        try:
            seen = outer.prepare(sandbox["backend"], sandbox["private"])
            lean = LeanParent(sandbox, seen) if _can_join(sandbox["backend"]) else None
        except OSError as error:
            failure = error
    from . import forkserver

    forkserver.main(boot_json, seen, lean, failure)


def _can_join(backend: str) -> bool:
    """Returns whether this process may join namespaces of workers.

    An ordinary user has no rights in the namespaces that bubblewrap makes.
    """
    if backend == "bubblewrap":
        return os.geteuid() == 0
    return backend in NAMESPACE_BACKENDS
