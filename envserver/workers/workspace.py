"""The folder that a program works in, in its worker, as a `Sandbox`.

An environment reads a program's output with the same functions with which it reads that of its own
agent in a sandbox. Here the sandbox is the worker's: what runs shares its limits, and may have been
changed by the program.
"""

from __future__ import annotations

import asyncio
import io
import os
import signal
import stat
import sys
import tarfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from envserver_records.errors import InputError
from envserver_records.sandboxes import ExecResult, SandboxLimits, SandboxUsage

SANDBOX_WORK = "/work"
_READ_BYTES = 65536
_ALL_SECONDS = 600.0


class OwnWorkspace:
    """The `Sandbox` of a worker that itself is in one.

    Args:
        folder: of the programs; they and environments also know it as /work.
        home: HOME of programs, beside it; their temporary files are in `tmp` there.
    """

    id = "own"
    isolation = "sandboxed"

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder = folder
        self.home = home
        self.variables = {"HOME": str(home), "TMPDIR": str(home / "tmp")}
        (home / "tmp").mkdir(parents=True, exist_ok=True)

    def fill(self, archive: bytes, files: Mapping[str, bytes]) -> None:
        """Unpacks the tar file and writes the files."""
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
        kept = children()
        try:
            program = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=self._place(cwd),
                env={**os.environ, **self.variables, **(env or {})},
                start_new_session=True,
            )
        except OSError as error:
            return ExecResult(exit=127, stderr=str(error).encode())
        most = limits.output_kb << 10
        outputs = [Kept(most), Kept(most)]
        killed = not await finished(program, stdin, outputs, limits.wall_seconds, kept)
        status = program.returncode
        assert status is not None
        return ExecResult(
            exit=status if status >= 0 else None,
            signal=-status if status < 0 else None,
            killed_by="wall" if killed else "",
            stdout=outputs[0].data(),
            stderr=outputs[1].data(),
            truncated=any(one.dropped for one in outputs),
        )

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

    async def close(self) -> None:
        """The worker ends it."""

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
    """The beginning and the end of an output.

    Args:
        most: bytes that are kept.
    """

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
        """Returns it for people, with a line that says what is missing."""
        head, tail = (part.decode("utf-8", "replace") for part in (self._head, self._tail))
        return f"{head}\n[cut: {self.dropped} bytes]\n{tail}" if self.dropped else head + tail


async def finished(
    program: asyncio.subprocess.Process,
    stdin: bytes,
    outputs: Sequence[Kept],
    seconds: float,
    kept: Collection[int],
) -> bool:
    """Waits for a program, ends it with all that it started, and reads what it printed.

    Args:
        outputs: get its standard output and standard error.
        kept: the other children of this process.

    Returns:
        Whether it ended by itself in this time.
    """
    reading = [
        asyncio.create_task(_keep(stream, kept))
        for stream, kept in zip((program.stdout, program.stderr), outputs, strict=True)
    ]
    feeding = asyncio.create_task(_feed(program.stdin, stdin))
    try:
        async with asyncio.timeout(seconds):
            await program.wait()
        return True
    except TimeoutError:
        return False
    finally:
        with suppress(ProcessLookupError):
            program.kill()
        await program.wait()
        await asyncio.to_thread(end_descendants, kept)
        feeding.cancel()
        await asyncio.gather(feeding, *reading, return_exceptions=True)


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
    """Kills the processes that this worker started, with all that these started.

    Args:
        kept: children that may live.
    """
    while ours := [pid for pid in _children(os.getpid()) if pid not in kept]:
        found = [*ours]
        for pid in found:
            found += _children(pid)
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in ours:  # their children become ours
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (thread / "children").read_text().split()]
    return found


def children() -> frozenset[int]:
    """Returns the processes that this one started."""
    return frozenset(_children(os.getpid()))
