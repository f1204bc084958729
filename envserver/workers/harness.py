"""Runs the external agent of an attempt (`--agent`) in a sandboxed worker.

How the program ended is judged by the proxy's record, never by its exit code: programs exit with 0
after an error. When this returns, nothing of it runs.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import os
import stat
import sys
import tarfile
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
from envserver_records.errors import AgentError, InputError, LimitReached
from envserver_records.sandboxes import ExecResult, SandboxLimits, SandboxUsage
from envserver_records.tasks import PublicTask

from ..environment import Environment
from ..harnesses import harness_of
from ..harnesses.programs import Launch, Session
from ..rollout_interface import HarnessSpec, HarnessTask
from . import linux
from .run import AttemptRun

# An environment reads a program's output with the same functions with which it reads that of its
# own agent in a sandbox. Here the sandbox is the worker's: what runs shares its limits, and may
# have been changed by the program.

SANDBOX_WORK = "/work"
_READ_BYTES = 65536
_ALL_SECONDS = 600.0


class OwnWorkspace:
    """The `Sandbox` of a worker that itself is in one.

    `folder`: of the programs, who also know it as /work; `home`: HOME of programs, beside it, with
    their temporary files in `tmp`.
    """

    id = "own"
    isolation = "sandboxed"

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder = folder
        self.home = home
        self.variables = {"HOME": str(home), "TMPDIR": str(home / "tmp")}
        (home / "tmp").mkdir(parents=True, exist_ok=True)

    def fill(self, archive: bytes, files: Mapping[str, bytes]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if archive:
            with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                tar.extractall(self.folder, filter="tar")
        for path, data in files.items():
            self._write(path, data)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str = SANDBOX_WORK,
        env: dict[str, str] | None = None,
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        limits = limits or SandboxLimits(wall_seconds=_ALL_SECONDS, output_kb=8192)
        most = limits.output_kb << 10
        try:
            status, outputs, in_time = await self.run(
                argv, self._place(cwd), env or {}, most, limits.wall_seconds, stdin=stdin
            )
        except OSError as error:
            return ExecResult(exit=127, stderr=str(error).encode())
        return ExecResult(
            exit=status if status >= 0 else None,
            signal=-status if status < 0 else None,
            killed_by="" if in_time else "wall",
            stdout=outputs[0].data(),
            stderr=outputs[1].data(),
            truncated=any(output.dropped for output in outputs),
        )

    async def run(
        self,
        argv: Sequence[str],
        folder: Path,
        env: Mapping[str, str],
        most: int,
        seconds: float,
        *,
        stdin: bytes | None = None,
        beside: Callable[[asyncio.subprocess.Process], Awaitable[None]] | None = None,
    ) -> tuple[int, list[Kept], bool]:
        """Runs a program and ends it with all that it started; OSError: it cannot be started.

        Returns its status, `most` bytes of its standard output and error, and whether it ended by
        itself in this time. `beside` runs while it does.
        """
        kept = linux.children()
        program = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=folder,
            env={**os.environ, **self.variables, **env},
            start_new_session=True,
        )
        outputs, in_time = [Kept(most), Kept(most)], False
        streams = zip((program.stdout, program.stderr), outputs, strict=True)
        reading = [asyncio.create_task(_keep(*pair)) for pair in streams]
        others = [asyncio.create_task(_feed(program.stdin, stdin or b""))]
        if beside is not None:
            others.append(asyncio.ensure_future(beside(program)))
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await program.wait()
                in_time = True
        finally:
            for task in others:
                task.cancel()
            with suppress(ProcessLookupError):
                program.kill()
            status = await program.wait()
            await asyncio.to_thread(end_descendants, kept)
            await asyncio.gather(*others, *reading, return_exceptions=True)
        return status, outputs, in_time

    async def run_python(
        self,
        code: str,
        *,
        argv: Sequence[str] = (),
        stdin: bytes = b"",
        cwd: str = SANDBOX_WORK,
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        command = [sys.executable, "-I", "-c", code, *argv]
        return await self.exec(command, stdin=stdin, cwd=cwd, limits=limits)

    async def read(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        return await asyncio.to_thread(self._read, path, max_bytes)

    async def write(self, path: str, data: bytes) -> None:
        await asyncio.to_thread(self._write, path, data)

    async def total(self) -> SandboxUsage:
        return SandboxUsage()

    async def close(self) -> None: ...

    def _place(self, path: str) -> Path:
        if path == SANDBOX_WORK or path.startswith(f"{SANDBOX_WORK}/"):
            path = path[len(SANDBOX_WORK) :].lstrip("/")
        return self.folder / path

    def _read(self, path: str, most: int) -> bytes:
        try:
            descriptor = os.open(self._place(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise InputError(f"{path} is not a file.", place=path)
                return file.read(most)
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read: {error}.", place=path) from None

    def _write(self, path: str, data: bytes) -> None:
        place = self._place(path)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.is_symlink() or place.exists():
                place.unlink()
            place.write_bytes(data)
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be written: {error}.", place=path) from None


class Kept:
    """The beginning and the end of an output, `most` bytes together."""

    def __init__(self, most: int) -> None:
        self._first, self._last = most - most // 2, most // 2
        self._head, self._tail = bytearray(), bytearray()
        self.dropped = 0

    def add(self, data: bytes) -> None:
        room = self._first - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        over = len(self._tail) - self._last
        if over > 0:
            del self._tail[:over]
            self.dropped += over

    def data(self) -> bytes:
        return bytes(self._head + self._tail)

    def text(self) -> str:
        head, tail = (part.decode("utf-8", "replace") for part in (self._head, self._tail))
        return f"{head}\n[cut: {self.dropped} bytes]\n{tail}" if self.dropped else head + tail


async def _keep(stream: asyncio.StreamReader | None, kept: Kept) -> None:
    while stream is not None and (data := await stream.read(_READ_BYTES)):
        kept.add(data)


async def _feed(stream: asyncio.StreamWriter | None, data: bytes) -> None:
    if stream is None:
        return
    with suppress(ConnectionError):
        stream.write(data)
        await stream.drain()
    stream.close()


def end_descendants(kept: Collection[int] = ()) -> None:
    """Kills the processes that this worker started, with all that these started."""
    while ours := [pid for pid in linux.children() if pid not in kept]:
        for pid in [*ours, *(below for child in ours for below in linux.descendants(child))]:
            with suppress(PermissionError):
                linux.kill(pid)
        for pid in ours:  # their children become ours
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


Ending = Literal["finished", "limit", "timed_out", "crashed", "not_started"]
"""finished: it ended by itself; limit: the proxy had refused it a call for a limit; crashed: it
ended although the model had called a tool; not_started: it ended without a call to the model."""

_READING_SECONDS = 30.0
"""Most seconds of a rollout that are kept for reading the output."""
_READING_SHARE = 0.1
_SAID = 2000
_MOST_WORDS = 1 << 20
_LOOK_SECONDS = 1.0
_LOOKS = 2
"""How often a final limit is seen before the program is ended; most end by themselves."""
_FINAL_LIMITS = ("turns", "tokens", "time", "record")
"""After "context" a program may go on with a shorter conversation."""


class CallRecord(msgspec.Struct, frozen=True):
    """What the proxy recorded of an attempt so far (GET record): the number of `calls` that were
    answered, the `limit` that the agent was refused for, the model's last `text` in the main
    conversation, whether that message called tools (`pending`), and the model's `context`."""

    calls: int
    limit: str | None
    text: str
    pending: bool
    context: int | None = None


Record = Callable[[], Awaitable[CallRecord]]


@dataclass(frozen=True)
class _Ended:
    """How a program ended. `status`: its exit code, or minus the signal that ended it; None: it
    could not be started."""

    status: int | None
    in_time: bool
    seconds: float
    said: str


async def play(
    environment: Environment[Any],
    public: PublicTask,
    spec: HarnessSpec,
    run: AttemptRun,
    record: Record,
) -> Any:
    task = await harness_task(environment, public, run)
    workspace = OwnWorkspace(*_folders())
    await asyncio.to_thread(workspace.fill, task.archive, task.files)
    tools = nullcontext("") if task.tools is None else run.serve_mcp(task.tools)
    async with tools as mcp_url:
        context = (await record()).context
        launch = _launch(task, spec, run, workspace, mcp_url, context)
        ended = await _run(launch, spec, workspace, run, record)
    seen = await record()
    ending = ending_of(ended.status, seen, in_time=ended.in_time)
    facts = {"seconds": round(ended.seconds, 3), "output": ended.said}
    about = {"ending": ending, "status": ended.status}
    run.log_action("agent", spec.identity(), {**about, **facts})
    run.log("agent_ended", agent=spec.name, **about)
    if ending == "not_started":
        raise AgentError(
            f"The agent {spec.name!r} ended without calling the model ({_status(ended.status)}): "
            f"{ended.said[-_SAID:].strip()}",
            hint="Does it use the address that it is given?",
        )
    if ending == "timed_out":
        raise LimitReached("The time of this rollout is used up.", limit="time")
    if ending == "crashed":
        raise LimitReached(
            f"The agent {spec.name!r} crashed ({_status(ended.status)}).", limit="crash"
        )
    words = await _words(launch, workspace) or seen.text
    return words if task.output is None else await task.output(workspace, words)


def ending_of(status: int | None, seen: CallRecord, *, in_time: bool) -> Ending:
    if seen.limit is not None:
        return "limit"
    if not in_time:
        return "timed_out"
    if not seen.calls:
        return "not_started"
    return "crashed" if seen.pending and status != 0 else "finished"


async def harness_task(
    environment: Environment[Any], public: PublicTask, run: AttemptRun
) -> HarnessTask:
    task = environment.harness_task(public, run)
    return await task if inspect.isawaitable(task) else task


def _folders() -> tuple[Path, Path]:
    """Returns the workspace (/work itself where the worker has a file system of its own) and the
    program's HOME."""
    here = Path.cwd()
    if str(here) == SANDBOX_WORK:
        return here, Path("/tmp/agent")
    return here / "work", here / "agent"


def _launch(
    task: HarnessTask,
    spec: HarnessSpec,
    run: AttemptRun,
    workspace: OwnWorkspace,
    mcp_url: str,
    context: int | None,
) -> Launch:
    instruction_file = workspace.home / "instruction.md"
    instruction_file.write_text(task.instruction)
    launch = harness_of(spec.name).launch(
        Session(
            spec=spec,
            home=workspace.home,
            workspace=workspace.folder,
            base_url=run.base_url,
            api_key=run.api_key,
            model=run.model,
            instruction=task.instruction,
            instruction_file=instruction_file,
            mcp_url=mcp_url,
            context=context,
            skills=task.skills,
        )
    )
    for path, text in launch.files.items():
        place = workspace.home / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return launch


async def _words(launch: Launch, workspace: OwnWorkspace) -> str:
    if not launch.words_file:
        return ""
    try:
        words = await workspace.read(str(workspace.home / launch.words_file), _MOST_WORDS)
    except InputError:
        return ""
    return words.decode("utf-8", "replace").strip()


async def _run(
    launch: Launch,
    spec: HarnessSpec,
    workspace: OwnWorkspace,
    run: AttemptRun,
    record: Record,
) -> _Ended:
    # The model's programs find those of the system first, not those of the agent.
    path = f"{os.environ.get('PATH', '/usr/bin:/bin')}:{spec.place}/bin"
    began = time.monotonic()
    left = run.seconds_left
    seconds = left - min(_READING_SECONDS, left * _READING_SHARE)
    try:
        status, outputs, in_time = await workspace.run(
            launch.argv,
            workspace.folder,
            {"PATH": path, **launch.env},
            spec.output_bytes // 2,
            seconds,
            beside=partial(_held_back, record),
        )
    except OSError as error:
        return _Ended(None, True, 0.0, f"{launch.argv[0]}: {error.strerror}")
    said = "\n".join(text for text in (output.text() for output in outputs) if text)
    return _Ended(status, in_time, time.monotonic() - began, said)


async def _held_back(record: Record, program: asyncio.subprocess.Process) -> None:
    """Ends a program that goes on after the proxy has refused it a call for good.

    The server would soon end the whole worker, and the output would be lost.
    """
    looks = 0
    while looks < _LOOKS:
        await asyncio.sleep(_LOOK_SECONDS)
        looks = looks + 1 if (await record()).limit in _FINAL_LIMITS else 0
    with suppress(ProcessLookupError):
        program.kill()


def _status(status: int | None) -> str:
    if status is None:
        return "it could not be started"
    return f"signal {-status}" if status < 0 else f"exit status {status}"
