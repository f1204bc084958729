"""A server that is killed leaves no process and no folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.waiting import until
from support.worker_standin import ZOO, alive

SERVER = """
import asyncio, sys, uvloop
from envserver.config import WorkersConfig
config = WorkersConfig(processes=2, heartbeat_seconds=60)
from envserver.workers.local import LocalPool
from support.worker_standin import ZOO, serving

async def main():
    async with serving() as proxy, LocalPool(config, [f"{ZOO}:Zoo"]) as pool:
        await pool.run(proxy.open("echo"))
        parent = proxy.open("grandchildren", pids=sys.argv[1], rest_seconds=3600)
        alone = proxy.open("sleep", isolation="dedicated", started=sys.argv[2])
        await asyncio.gather(pool.run(parent), pool.run(alone))

uvloop.run(main())
"""


async def test_nothing_survives_a_killed_server(tmp_path: Path) -> None:
    pids, started = tmp_path / "pids", tmp_path / "started"
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(pids), str(started)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    try:
        await until(lambda: started.exists() and pids.exists() and pids.read_text())
        (root,) = tmp_path.glob("envserver-workers-*")
        family = [int(pid) for pid in pids.read_text().split()] + marked_by(root)
        assert len(set(family)) >= 7  # forkserver, 3 workers, 3 grandchildren
    finally:
        server.kill()
        server.wait()
    await until(lambda: not any(alive(pid) for pid in family) and not marked_by(root))
    assert not root.exists()


KILLED_AT_ITS_START = """
import asyncio, os, signal, subprocess
from envserver import SandboxConfig, WorkersConfig
from envserver.sandbox.service import SandboxService
from envserver.workers import LocalPool

class Popen(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

subprocess.Popen = Popen
asyncio.run({}.__aenter__())
"""


@pytest.mark.parametrize(
    "starts",
    [
        f"LocalPool(WorkersConfig(processes=1), ['{ZOO}:Zoo'])",
        "SandboxService(SandboxConfig(backend='namespace'))",
    ],
    ids=["workers", "sandboxes"],
)
async def test_a_server_that_is_killed_while_it_starts_leaves_nothing(starts: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # its path is short enough for sockets
        killed = subprocess.run(
            [sys.executable, "-c", KILLED_AT_ITS_START.format(starts)],
            env={**os.environ, "TMPDIR": folder},
            stderr=subprocess.DEVNULL,
            check=False,
        )
        assert killed.returncode == -signal.SIGKILL
        await until(lambda: not list(Path(folder).iterdir()))


def marked_by(root: Path) -> list[int]:
    """Processes whose environment variables name `root`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.fsencode(root) in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return [pid for pid in found if alive(pid)]
