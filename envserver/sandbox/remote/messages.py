"""What a client and a sandbox machine send each other: one WebSocket is one sandbox.

Binary messages carry a stream of frames (4 bytes of length, then MessagePack), cut anywhere:

    client     [number, word, body]
    machine    [number, "ok", value]  or  [number, "error", Problem]

    open       SandboxSpec -> Opened    comes first
    exec       Exec -> ExecResult
    python     RunPython -> ExecResult
    read       Read -> bytes
    write      Write -> None
    total      None -> SandboxUsage
    start      StartProgram -> None     the only program of this sandbox
    send       Send -> None             input of the program
    receive    None -> Received         waits for output, or the program's end
    ended      None -> ExecResult       ends the program if it still runs
    lead_out   None -> bool             whether its programs have an HTTP proxy from now on
    accept     None -> int              waits until a program connects to the proxy
    pass       Pass -> None             bytes to such a connection; none: they have ended
    take       int -> bytes             waits for bytes of one; none: they have ended
    close      None -> None             when all its processes are gone
    cancel     int                      gives a request up; that is answered "cancelled"

Requests may overlap; each side sends the next piece of a stream when the one before was answered,
so nothing piles up.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from envserver_records.errors import (
    EnvserverError,
    InputError,
    SandboxError,
    SandboxImageMissing,
    SandboxLost,
    SandboxUnavailable,
)
from envserver_records.framing import frame
from envserver_records.packing import ready
from envserver_records.records import ExecResult, SandboxSpec, SandboxUsage

from ..requests import Exec, Read, Received, RunPython, Send, Write
from ..wire import MAX_FRAME_BYTES

PROTOCOL: Final = 1
"""Version of these messages; client and machine must have the same."""
PATH: Final = "/v1/sandboxes"
"""The WebSocket; a GET returns the machine's `Load`."""
PIECE_BYTES: Final = 1 << 18
"""Bytes of one WebSocket message."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How busy a machine is.

    Args:
        sandboxes: maximum sandboxes at a time; `open` are taken, `waiting` requests want one.
        room: maximum programs that run at a time; `running` do, `queued` wait.
        draining: it takes no more sandboxes.
    """

    protocol: int = PROTOCOL
    backend: str = ""
    sandboxes: int = 0
    open: int = 0
    waiting: int = 0
    room: int = 0
    running: int = 0
    queued: int = 0
    draining: bool = False


class Opened(msgspec.Struct, frozen=True):
    """A sandbox is open: its backend, and the machine's load with it."""

    isolation: str
    load: Load


class StartProgram(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See `TalkingSandbox.start`."""

    argv: list[str]
    env: dict[str, str]
    wall_seconds: float


class Pass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes to connection `number` of a program to its HTTP proxy; b"": no more come."""

    number: int
    data: bytes


class Problem(msgspec.Struct, frozen=True):
    """Why a request failed; `kind`: a key of `_ERRORS`, or "cancelled"."""

    kind: str
    message: str
    hint: str = ""


class MachineBusy(SandboxUnavailable):
    """The machine takes no more sandboxes now; another one may."""


BODIES: Final[dict[str, Any]] = {
    "open": SandboxSpec,
    "exec": Exec,
    "python": RunPython,
    "read": Read,
    "write": Write,
    "start": StartProgram,
    "send": Send,
    "pass": Pass,
    "take": int,
    "cancel": int,
}
"""Type of the body of each word that has one."""

_ERRORS: Final[dict[str, type[EnvserverError]]] = {
    "input": InputError,
    "busy": MachineBusy,
    "image": SandboxImageMissing,
    "unavailable": SandboxUnavailable,
    "lost": SandboxLost,
}
Request = tuple[int, str, msgspec.Raw]
Answer = tuple[int, str, msgspec.Raw]

for _kind in (*BODIES.values(), ExecResult, SandboxUsage, Received, Opened, Problem, Load, Request):
    ready(_kind)


def framed(number: int, word: str, body: object) -> bytes:
    """Returns one message as a frame.
    Raises InputError: it is too large, or text in it is not valid Unicode.
    """
    try:
        packed = msgspec.msgpack.encode((number, word, body))
    except UnicodeEncodeError as error:  # half a surrogate pair: a model can write that
        raise InputError(f"Text for a sandbox must be valid Unicode: {error}.") from error
    if len(packed) > MAX_FRAME_BYTES:
        raise InputError(f"{len(packed)} bytes are too many for a sandbox at once.")
    return frame(packed)


def problem_of(error: Exception) -> Problem:
    """Returns the message for `error`; an untyped one is the machine's fault."""
    if isinstance(error, EnvserverError):
        for kind, known in _ERRORS.items():
            if isinstance(error, known):
                return Problem(kind, error.message, error.hint)
        kind = "lost" if isinstance(error, SandboxError) else "input"
        return Problem(kind, error.message, error.hint)
    return Problem("lost", f"The sandbox failed: {type(error).__name__}: {error}")


def error_of(problem: Problem) -> EnvserverError:
    """Returns the error that `problem` describes."""
    return _ERRORS.get(problem.kind, SandboxLost)(problem.message, hint=problem.hint)
