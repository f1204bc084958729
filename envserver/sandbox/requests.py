"""Requests of a worker to the sandboxes of its attempt: `POST {url}/sandbox/...`.

    open                Open -> Opened
    {id}/exec           Exec -> ExecResult
    {id}/python         RunPython -> ExecResult
    {id}/read           Read -> bytes
    {id}/write          Write -> None
    {id}/total          None -> SandboxUsage
    {id}/close          None -> None

Bodies are MessagePack both ways; what is not 200 is the proxy's JSON error.
"""

from __future__ import annotations

import msgspec
from envserver_records.records import SandboxLimits, SandboxSpec


class Open(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`spec` None: the environment's own."""

    spec: SandboxSpec | None = None


class Opened(msgspec.Struct, frozen=True):
    """`id` is known to this attempt only; `isolation`: the backend."""

    id: str
    isolation: str


class Exec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See `sandbox_interface.Sandbox.exec`."""

    argv: list[str]
    stdin: bytes
    cwd: str
    env: dict[str, str] | None
    limits: SandboxLimits | None


class RunPython(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See `sandbox_interface.Sandbox.run_python`."""

    code: str
    argv: list[str]
    stdin: bytes
    cwd: str
    limits: SandboxLimits | None


class Read(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See `sandbox_interface.Sandbox.read`."""

    path: str
    max_bytes: int


class Write(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See `sandbox_interface.Sandbox.write`."""

    path: str
    data: bytes
