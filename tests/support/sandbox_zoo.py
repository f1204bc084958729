"""Agents that use sandboxes well and badly, and scorers too, for test_sandbox_rollouts.py.

What they run is marked by an unusual number of seconds to sleep, so that a test can find it.
"""

import asyncio
import os
import signal
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path

from envserver import Environment, InputError, SandboxError, SandboxLimits, SandboxSpec, Score, Task

SPEC = SandboxSpec(
    files={"greeting": b"hello"},
    env={"COLOR": "blue"},
    preload=("json",),
    limits=SandboxLimits(wall_seconds=3600.0, memory_mb=256, disk_mb=4, processes=16),
)


async def until_it_runs(marker):
    while subprocess.run(["pgrep", "-f", marker], stdout=subprocess.DEVNULL).returncode != 0:
        await asyncio.sleep(0.02)


class Base(Environment):
    sandbox = SPEC
    score_timeout_seconds = 600.0

    def tasks(self, split):
        for number in range(2):
            yield Task(f"sums-{number}", {"do": "sums", "marker": "0"}, {"answer": "42"})

    def demonstration(self, task):
        return [{"role": "assistant", "content": "6 * 7"}]

    def score(self, task, result):
        return Score(reward=1.0)


class Zoo(Base):
    async def rollout(self, task, run):
        return await getattr(self, task.public["do"])(run, task.public["marker"])

    async def sums(self, run, marker):
        """Lets the sandbox calculate, with every method of it."""
        reply = await run.chat([{"role": "user", "content": "What gives 42?"}])
        async with run.open_sandbox() as sandbox:
            await sandbox.write("sub/question", b"6 * 7")
            shown = await sandbox.exec(["cat", "greeting", "sub/question"], env={"X": "1"})
            code = "import sys; print(eval(sys.stdin.read()), sys.argv[1:])"
            summed = await sandbox.run_python(code, argv=["a"], stdin=b"6 * 7")
            await sandbox.exec(["bash", "-c", "echo $COLOR > color"])
            color = await sandbox.read("/work/color")
            total = await sandbox.total()
        return {
            "said": reply.content,
            "shown": shown.stdout.decode(),
            "summed": summed.stdout.decode(),
            "color": color.decode(),
            "executions": total.executions,
            "backend": sandbox.isolation,
        }

    async def leave_open(self, run, marker):
        """Two sandboxes, one with a program that runs; nothing is ever closed."""
        self.kept = [run.open_sandbox(), run.open_sandbox()]
        one, two = [await opening.__aenter__() for opening in self.kept]
        await two.run_python("x = 1")
        self.started = asyncio.create_task(one.exec(["sleep", marker]))
        await until_it_runs(marker)
        return "left"

    async def die(self, run, marker):
        async with run.open_sandbox() as sandbox:
            await asyncio.wait({asyncio.create_task(sandbox.exec(["sleep", marker]))}, timeout=0.5)
            os.kill(os.getpid(), signal.SIGKILL)
            os._exit(9)  # behind the backend no signal ends it

    async def lose_patience(self, run, marker):
        """A program that was cancelled has ended, and the sandbox is as good as before."""
        async with run.open_sandbox() as sandbox:
            started = asyncio.create_task(sandbox.exec(["sleep", marker]))
            await until_it_runs(marker)
            started.cancel()
            await asyncio.wait({started})
            after = await sandbox.exec(["pgrep", "-f", marker])
            again = await sandbox.run_python("print('well')")
            return [after.exit, again.stdout.decode(), (await sandbox.total()).killed]

    async def overrun(self, run, marker):
        async with run.open_sandbox() as sandbox:
            await sandbox.exec(["sleep", marker])

    async def ask_too_much(self, run, marker):
        """Everything that is over the environment's own spec."""
        said = {}
        for name, spec in {
            "preload": SandboxSpec(preload=("json", "os")),
            "disk": SandboxSpec(files={"big": bytes(8 << 20)}, limits=SandboxLimits(disk_mb=1000)),
            "nan": SandboxSpec(limits=SandboxLimits(wall_seconds=float("nan"))),
            "variable": SandboxSpec(env={"A=B": "1"}),
        }.items():
            try:
                async with run.open_sandbox(spec):
                    said[name] = "got it"
            except InputError as error:
                said[name] = error.message
        wide = SandboxLimits(wall_seconds=1000, memory_mb=10_000, processes=1000, output_kb=9999)
        async with run.open_sandbox(SandboxSpec(limits=wide)) as sandbox:
            hungry = await sandbox.run_python("x = bytearray(600 << 20)", limits=wide)
            said["memory"] = hungry.killed_by or hungry.exit
            said["wide"] = await self._refusal(sandbox.exec(["a\0b"]))
            said["stdin"] = await self._refusal(sandbox.exec(["cat"], stdin=bytes(2 << 20)))
            said["limit"] = await self._refusal(
                sandbox.exec(["true"], limits=SandboxLimits(wall_seconds=-1))
            )
        async with AsyncExitStack() as stack:
            for count in range(20):
                try:
                    await stack.enter_async_context(run.open_sandbox())
                except InputError as error:
                    said["many"] = [count, error.message]
                    break
        return said

    async def _refusal(self, asked):
        try:
            await asked
        except InputError as error:
            return error.message
        return "got it"

    async def swallow(self, run, marker):
        """Takes whatever goes wrong for the end of its work."""
        try:
            async with run.open_sandbox() as sandbox:
                Path(marker).write_text("open")
                await sandbox.exec(["sleep", "3600"])
        except Exception as error:  # noqa: BLE001 - hiding it is the point
            return type(error).__name__
        return "all was well"

    async def hold(self, run, marker):
        async with run.open_sandbox():
            Path(marker).touch()
            await asyncio.Event().wait()

    async def share(self, run, marker):
        """Its files, and what it can name of another attempt's."""
        async with run.open_sandbox() as sandbox:
            await sandbox.write("mine", run.rollout_id.encode())
            Path(marker, run.rollout_id).touch()
            while len(list(Path(marker).iterdir())) < 2:  # until the other has its file, too
                await asyncio.sleep(0.01)
            listed = await sandbox.exec(["ls", "/work", "/tmp"])
            return [(await sandbox.read("mine")).decode(), listed.stdout.decode()]

    async def score(self, task, result):
        """What the output says; "swallow" takes a sandbox that was lost for a wrong answer."""
        if not isinstance(result.output, dict) or "score" not in result.output:
            return Score(reward=1.0)
        marker = result.output.get("marker", "")
        try:
            async with self.sandboxes.open(SPEC) as sandbox:
                if result.output["score"] == "hang":
                    await sandbox.exec(["sleep", marker])
                if result.output["score"] == "swallow":
                    Path(marker).write_text("open")
                    await sandbox.exec(["sleep", "3600"])
                summed = await sandbox.run_python("print(6 * 7)")
        except SandboxError:
            return Score(reward=0.0)
        return Score(reward=float(summed.stdout.decode().strip() == task.hidden["answer"]))


class Sandboxed(Zoo):
    """Runs its agents in sandboxed workers."""

    isolation = "sandboxed"


class Plain(Base):
    """The same without asyncio."""

    isolation = "dedicated"

    def rollout(self, task, run):
        with run.open_sandbox_blocking(SandboxSpec(files={"a": b"1"})) as sandbox:
            sandbox.write("b", b"2")
            shown = sandbox.exec(["cat", "a", "b"]).stdout + sandbox.read("a")
            summed = sandbox.run_python("print(6 * 7)")
            return [shown.decode(), summed.stdout.decode(), sandbox.total().executions]


class Bare(Base):
    """Declares no sandbox, and asks for one."""

    sandbox = None

    async def rollout(self, task, run):
        try:
            async with run.open_sandbox():
                return "open"
        except SandboxError as error:
            return error.message
