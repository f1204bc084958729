"""Determines what a zygote must know before its outer layer is closed, in a short-lived process.

This needs a good part of the standard library, and every module that a zygote has imported makes
each of its forks slower: 0.1 ms of CPU per megabyte, and a sandbox takes two forks.
"""

from __future__ import annotations

import json
import os
from typing import Any

from . import seccomp, system
from .wire import NAMESPACE_BACKENDS


def describe(backend: str, private: tuple[str, ...]) -> dict[str, Any]:
    """
    Args:
        private: see `hidden.hidden_paths`.

    Returns:
        `moves`: Python must be moved first (`system.move_python`), and the rest asked for again;
        `visible`, `partly`, `etc`, `variables`, `search_path`, `one_thread`: see `system`;
        `filter`: of system calls, for programs, in hexadecimal digits; `tcp_filter`: one for
        workers in the host's network.
    """
    whole = backend in NAMESPACE_BACKENDS
    if whole and system.must_move_python():
        return {"moves": True}
    return {
        "moves": False,
        "visible": system.visible_paths(private),
        "partly": system.partly_visible(private),
        "etc": system.etc_files(),
        "variables": system.variables(),
        "search_path": system.search_path(),
        "one_thread": system.ONE_THREAD,
        "filter": seccomp.program(inet=whole).hex(),
        "tcp_filter": seccomp.program(inet=True, host=True).hex(),
    }


def tell(backend: str, private: tuple[str, ...], descriptor: int) -> None:
    """Writes the description, or the failure, as JSON."""
    try:
        text = json.dumps(["ok", describe(backend, private)])
    except Exception as error:  # noqa: BLE001 - whatever it is, the zygote must hear of it
        text = json.dumps(["error", f"{type(error).__name__}: {error}"])
    with os.fdopen(descriptor, "w") as pipe:
        pipe.write(text)
