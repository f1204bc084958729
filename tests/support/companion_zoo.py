"""A worker and its companion that say what they may do, for test_sandboxed_workers.py."""

import asyncio
import json
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path

LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]
NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
RIGHTS = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs")


def facts() -> dict[str, object]:
    """Returns facts of this process: ids, limits, namespaces, open files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "namespaces": [str(Path("/proc/self/ns", name).readlink()) for name in NAMESPACES],
        "rights": {name: lines[name].split() for name in (*RIGHTS, "Seccomp", "Seccomp_filters")},
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
        "environ": dict(os.environ),
        "cwd": str(Path.cwd()),
        "root": sorted(map(str, Path("/").iterdir())),
        "path": sys.path,
        "host": socket.gethostname(),
    }


def accompany(channel: socket.socket) -> None:
    """Answers one request: facts of itself, or seconds of work, or its end by a signal."""
    asked = json.loads(channel.recv(1 << 16))
    if asked == "facts":
        opened = [path.name for path in list(Path("/proc/self/fd").iterdir()) if path.is_symlink()]
        told = {**facts(), "open": opened, "modules": sorted(sys.modules)}
        channel.sendall(json.dumps(told).encode())
    elif asked == "work":
        print("the companion works", flush=True)
        until = time.process_time() + 0.5
        while time.process_time() < until:
            pass
    else:
        os.kill(os.getpid(), signal.SIGKILL)


if "envserver.environment" in sys.modules:  # here it is a worker, which has imported much
    from envserver import Environment, Score, Task, take_companion

    class Accompanied(Environment):
        isolation = "sandboxed"
        companion = "support.companion_zoo:accompany"

        def tasks(self, split):
            yield Task("only", {"do": "facts"}, {})

        def score(self, task, result):
            return Score(reward=1.0)

        async def rollout(self, task, run):
            if task.public["do"] == "be lost":
                os.kill(-1, signal.SIGKILL)  # as process 1: all others of the sandbox
                while len([one for one in Path("/proc").iterdir() if one.name.isdigit()]) > 1:
                    await asyncio.sleep(0.01)
                return take_companion(self.companion) is None
            companion = take_companion(self.companion)
            assert take_companion(self.companion) is None
            if task.public["do"] == "nothing":
                return None
            companion.channel.sendall(json.dumps(task.public["do"]).encode())
            told = await asyncio.to_thread(companion.channel.recv, 1 << 20)
            status = await asyncio.to_thread(companion.wait)
            return {"own": facts(), "its": json.loads(told or "null"), "status": status}

    class Lost(Accompanied):
        companion = "no_such_module:accompany"
