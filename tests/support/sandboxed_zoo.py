"""Agents that try to get out of a sandboxed worker, for test_sandboxed_workers.py."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

from envserver import Environment, Score, Task

SECRET = "the-hidden-answer"


class Sandboxed(Environment):
    isolation = "sandboxed"

    def tasks(self, split):
        yield Task("only", {"do": "look"}, {"answer": SECRET})

    def score(self, task, result):
        return Score(reward=1.0)

    async def rollout(self, task, run):
        return await getattr(self, task.public["do"])(task.public, run)

    async def look(self, public, run):
        return {
            "environ": dict(os.environ),
            "cwd": str(Path.cwd()),
            "uid": os.getuid(),
            "processes": [int(e.name) for e in Path("/proc").iterdir() if e.name.isdigit()],
            "root": sorted(e.name for e in Path("/").iterdir()),
        }

    async def read(self, public, run):
        return Path(public["path"]).read_text()[:200]

    async def connect(self, public, run):
        with socket.create_connection((public["host"], public["port"]), timeout=60):
            return "connected"

    async def chat(self, public, run):
        reply = await run.chat([{"role": "user", "content": "hi"}])
        asked = {"model": run.model, "messages": [{"role": "user", "content": "hi"}]}
        answer = await run.client.chat.completions.create(**asked)
        return [reply.content, answer.choices[0].message.content]

    async def compute(self, public, run):
        Path("notes.txt").write_text("kept here")
        printed = subprocess.run(
            [sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True, check=True
        )
        return [printed.stdout.strip(), Path("notes.txt").read_text()]

    async def eat_memory(self, public, run):
        """Each process stays below its own limit; together they have twice as much."""
        for _ in range(8):
            if os.fork() == 0:
                piece = bytearray(100 * 2**20)
                piece[::4096] = b"x" * len(piece[::4096])
                time.sleep(3600)
        await asyncio.Event().wait()

    async def fill_sockets(self, public, run):
        return await asyncio.to_thread(self._fill_sockets)  # it stays responsive

    def _fill_sockets(self):
        """What waits in them is memory of no process."""
        pairs = []
        for _ in range(8):
            if os.fork() == 0:
                break
        try:
            while True:
                pairs.append(socket.socketpair())
        except OSError:
            time.sleep(3600)

    async def hold_files(self, public, run):
        return len(self._fill_descriptors())

    async def hold_files_and_hang_up(self, public, run):
        """Holds every descriptor, so that no connection to the proxy can be opened again."""
        self._fill_descriptors()
        threading.Thread(target=self._keep_full, daemon=True).start()
        for number in range(3, 100):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with contextlib.suppress(OSError), socket.socket(fileno=number) as one:
                    if one.family == socket.AF_INET:
                        one.shutdown(socket.SHUT_RDWR)
                    one.detach()
        await asyncio.sleep(0.5)
        return "done" * 10_000

    def _fill_descriptors(self):
        held = []
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        return held

    def _keep_full(self):
        while True:
            self._fill_descriptors()
            time.sleep(0.001)

    async def fill_disk(self, public, run):
        with Path("big").open("wb") as file:
            for _ in range(4096):
                file.write(b"x" * 2**20)

    async def leave_something(self, public, run):
        sleep = f"sleep {public['mark']}"
        for _ in range(3):
            subprocess.Popen(["sh", "-c", f"setsid {sleep} & exec {sleep}"], start_new_session=True)
        return "left"

    async def crash(self, public, run):
        print("last words", flush=True)
        ctypes.string_at(0)

    async def leave(self, public, run):
        os._exit(9)

    async def attack(self, public, run):
        for command in (f"kill -{public['signal']} $PPID", f"kill -{public['signal']} 1"):
            subprocess.run(["sh", "-c", command])
        os.kill(os.getpid(), public["signal"])
        return "still here"

    async def mount(self, public, run):
        return subprocess.run(["unshare", "-Ur", "true"], capture_output=True).returncode

    async def spin(self, public, run):
        while True:
            pass
