"""Messages of the control sockets, and the arguments of the forkserver.

A frame (`envserver_records.framing`) holds a non-empty list of strings as MessagePack:

    server -> worker    ["run", rollout_id, url, job]   ["cancel", rollout_id]   ["stop"]
    worker -> server    ["ready"]   ["beat"]   ["done", rollout_id]   ["done", rollout_id, result]

Job and result are JSON. Everything else goes over HTTP, and so does a larger result: what a worker
sends stays small, and the first bytes show what is not a frame.
"""

from __future__ import annotations

import msgspec
from envserver_records import framing

MAX_FRAME_BYTES = 64 * 1024
"""Maximum size of a frame from a worker."""
MAX_RESULT_BYTES = 32 * 1024
"""Larger results are posted over HTTP."""
BEATS_PER_SILENCE = 4
"""Beats in the time after which a silent worker counts as hung."""

decode = msgspec.msgpack.Decoder(list[str]).decode


def encode(*parts: str) -> bytes:
    return framing.frame(msgspec.msgpack.encode(parts))


READ_BYTES = 65536


class WorkerSandbox(msgspec.Struct, frozen=True, kw_only=True):
    """The sandbox of workers: limits of one with all that it starts.

    Args:
        port: of the proxy, on this machine's loopback.
        disk_mb, inodes: limits of what it may write.
        reserved_mb: memory that a process may reserve beyond what it uses, as engines of
            JavaScript do.
        shown: folder of this machine that its programs see, read-only, at `outer.PLACE`; with
            landlock at its own place. "": none.
        private: see `sandbox.system.hidden_paths`.
    """

    backend: str
    port: int
    memory_mb: int
    disk_mb: int
    inodes: int = 65536
    processes: int = 256
    reserved_mb: int = 0
    shown: str = ""
    private: list[str] = []


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of the forkserver, passed as JSON.

    Args:
        references: environments to import now.
        heartbeat_seconds: a worker that is silent for longer is killed.
        control_fd: of a SOCK_SEQPACKET socket whose other end only the server holds.
        root: directory for the workers' directories; removed at the end.
    """

    references: list[str]
    heartbeat_seconds: float
    control_fd: int = -1
    server_pid: int = 0
    root: str = ""
    sandbox: WorkerSandbox | None = None
    most_workers: int = 1
