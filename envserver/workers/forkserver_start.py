"""Starts the forkserver: what must be done before it has imported much.

Where workers have namespaces of their own, a lean parent of companions is started beside it.
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
    """Runs the forkserver; removes its folder at the end, whenever the server ends."""
    boot = json.loads(boot_json)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        if os.getppid() == boot["server_pid"]:  # else it has ended already
            _run(boot_json, boot)
    finally:
        import shutil  # not before: it would be in each companion

        shutil.rmtree(boot["root"], ignore_errors=True)


def _run(boot_json: str, boot: dict[str, Any]) -> None:
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
    """An ordinary user has no rights in the namespaces that bubblewrap makes."""
    if backend == "bubblewrap":
        return os.geteuid() == 0
    return backend in NAMESPACE_BACKENDS
