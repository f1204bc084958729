"""The interpreter as a companion of its agent (see `envserver.take_companion`), with what models'
code imports most; the agent does without."""

from __future__ import annotations

import contextlib
import importlib
import socket

from .inside import live

USUAL = (
    *("collections", "csv", "datetime", "fractions", "itertools", "json", "math", "random", "re"),
    *("statistics", "string", "numpy"),
)
for _name in USUAL:
    with contextlib.suppress(ImportError):  # numpy, which this needs not
        importlib.import_module(_name)


def accompany(channel: socket.socket) -> None:
    """Runs the interpreter, if its agent asks for it before it ends."""
    _, outputs, _, _ = socket.recv_fds(channel, 1, 1)
    if outputs:
        live(channel, outputs[0])
