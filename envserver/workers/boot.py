"""The protocol between a server and its forkserver: arguments and sizes of messages."""

from __future__ import annotations

import msgspec

from .sandboxed import WorkerSandbox

READ_BYTES = 65536


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of the forkserver, passed as JSON.

    Args:
        control_fd: of a SOCK_SEQPACKET socket whose other end only the server holds.
        server_pid: the forkserver ends when this process does.
        root: directory for the workers' directories; removed at the end.
        references: environments to import now.
        heartbeat_seconds: a worker that is silent for longer is killed.
        sandbox: sandbox of every worker; None: no sandbox.
        most_workers: maximum number of live workers.
    """

    control_fd: int
    server_pid: int
    root: str
    references: list[str]
    heartbeat_seconds: float
    sandbox: WorkerSandbox | None = None
    most_workers: int = 1
