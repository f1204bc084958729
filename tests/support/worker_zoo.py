"""Agents that behave and agents that do not, or try to get out of a sandbox; the task says which.

It is loaded by its path, as a user's environment file is.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

from envserver import Environment, EnvironmentConfig, Score, Task


class Base(Environment):
    def tasks(self, split):
        yield Task("only", {"do": "echo"}, {"answer": "the-hidden-answer"})

    def score(self, task, result):
        return Score(reward=1.0)


class Zoo(Base):
    class Config(EnvironmentConfig):
        setup_seconds: float = 0.0
        setup_waits: bool = False

    async def setup(self):
        time.sleep(self.config.setup_seconds)
        if self.config.setup_waits:
            await asyncio.Event().wait()

    async def rollout(self, task, run):
        return await getattr(self, task.public["do"])(task.public, run)

    async def echo(self, public, run):
        run.log_metric("length", len(public.get("text", "")))
        return {"text": public.get("text"), "pid": os.getpid(), "cwd": str(Path.cwd())}

    async def chat(self, public, run):
        reply = await run.chat([{"role": "user", "content": "hi"}], agent="solver", max_tokens=5)
        run.log("chatted", turns=1, path=Path("/tmp"))
        return [reply.content, reply.finish_reason, reply.message["role"]]

    async def openai_client(self, public, run):
        asked = {"model": run.model, "messages": [{"role": "user", "content": "hi"}]}
        return (await run.client.chat.completions.create(**asked)).choices[0].message.content

    async def environ(self, public, run):
        return dict(os.environ)

    async def fail(self, public, run):
        raise KeyError("no such thing")

    async def unsendable(self, public, run):
        return {"a", "set"}

    async def sys_exit(self, public, run):
        sys.exit(3)

    async def os_exit(self, public, run):
        print("last words")
        os._exit(3)

    async def kill_itself(self, public, run):
        os.kill(os.getpid(), signal.SIGKILL)

    async def segfault(self, public, run):
        print("last words", flush=True)
        ctypes.string_at(0)

    async def spin(self, public, run):
        while True:
            pass

    async def garbage(self, public, run):
        for fd in range(3, 64):
            try:
                control = socket.socket(fileno=os.dup(fd))
            except OSError:
                continue
            if control.family == socket.AF_UNIX:
                control.send(b"\xff" * 64)
        await asyncio.Event().wait()

    async def sleep(self, public, run):
        Path(public["started"]).touch()
        try:
            await asyncio.Event().wait()
        finally:
            if "ended" in public:
                Path(public["ended"]).touch()

    async def forget_a_task(self, public, run):
        async def nap():
            await self.sleep(public, run)

        asyncio.create_task(nap())  # noqa: RUF006 - forgetting it is the point
        while not Path(public["started"]).exists():
            await asyncio.sleep(0.01)

    async def grandchildren(self, public, run):
        """One in our process group, one in its own session, one whose parent is gone already."""
        inner = 'import subprocess as s; print(s.Popen(["sleep", "300"], stdout=-3, stderr=-3).pid)'
        same = subprocess.Popen(["sleep", "300"])
        own = subprocess.Popen(["sleep", "300"], start_new_session=True)
        lost = subprocess.run([sys.executable, "-c", inner], capture_output=True, text=True)
        pids = [os.getpid(), same.pid, own.pid, int(lost.stdout)]
        Path(public["pids"]).write_text(" ".join(map(str, pids)))
        if public.get("exit"):
            os._exit(0)
        await asyncio.sleep(public["rest_seconds"])

    async def flood(self, public, run):
        line = "x" * 999
        for _ in range(public["lines"]):
            print(line)
        print("the last line")
        return "done"

    async def dirty_directory(self, public, run):
        Path("sub").mkdir()
        Path("sub/file").write_text("something")
        return str(Path.cwd())


class Saver(Base):
    """Leaves an open generator behind, and a thread that its `close` starts."""

    async def rollout(self, task, run):
        self.folder = Path(task.public["folder"])
        self.pages = self.read()
        return await anext(self.pages)

    async def read(self):
        try:
            yield "a page"
        finally:
            (self.folder / "read").touch()

    async def close(self):
        asyncio.get_running_loop().run_in_executor(None, self.save)

    def save(self):
        time.sleep(0.5)
        (self.folder / "saved").touch()


class Plain(Base):
    def rollout(self, task, run):
        return getattr(self, task.public["do"])(task.public, run)

    def chat(self, public, run):
        return run.chat_blocking([{"role": "user", "content": "hi"}]).content

    def openai_client(self, public, run):
        asked = {"model": run.model, "messages": [{"role": "user", "content": "hi"}]}
        return run.blocking_client.chat.completions.create(**asked).choices[0].message.content

    def busy(self, public, run):
        until = time.monotonic() + public["rest_seconds"]
        while time.monotonic() < until:
            sum(range(1000))
        return "done"

    def sleep(self, public, run):
        Path(public["started"]).touch()
        time.sleep(3600)


class Sandboxed(Zoo):
    isolation = "sandboxed"

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

    async def attack(self, public, run):
        for command in (f"kill -{public['signal']} $PPID", f"kill -{public['signal']} 1"):
            subprocess.run(["sh", "-c", command])
        os.kill(os.getpid(), public["signal"])
        return "still here"

    async def mount(self, public, run):
        return subprocess.run(["unshare", "-Ur", "true"], capture_output=True).returncode
