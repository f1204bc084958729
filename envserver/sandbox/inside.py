"""The in-sandbox server: runs programs under limits and reports how they ended.

It is process 1 of the sandbox's pid namespace (in weaker backends: the ancestor of all its
programs) and the only process that holds the socket to the outside. It was forked from a zygote, so
it needs no start-up. It is single-threaded, never waits for a program without a limit, and programs
cannot read or trace it. When the other end of the socket closes, it ends, and kills all programs.

Requests: ["setup", spec], ["run", program], ["cancel"], ["read", path, bytes], ["write", path,
data], ["total"], ["lead_out"], ["start", program], ["ended"]. Each is answered by ["ok", ...] or
["error", kind, message], in order. The answer to "start" comes before its program runs, with a
socket that is the program's input and output; "ended" tells how it ended.
"""

from __future__ import annotations

import io
import os
import resource
import select
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from . import linux
from .backend import Backend
from .program import MB, Program, become
from .usage import Totals, sample
from .wire import MAX_FRAME_BYTES, Frames, encode

if TYPE_CHECKING:
    import tarfile


FIRST_LOOK_SECONDS = 0.005
LOOK_SECONDS = 0.025
OUTPUT_KILL_FACTOR = 8
"""Multiple of the kept output at which a writing program is killed; before, it is dropped."""
_READ_BYTES = 65536
_DRAIN_SECONDS = 1.0


class _Output:
    """The output of one pipe: keeps the beginning and counts the rest."""

    def __init__(self, keep: int) -> None:
        self.reading, self.writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.reading, False)
        self.kept = bytearray()
        self.total = 0
        self._keep = keep

    def take(self) -> bool:
        """Reads the available output; False at its end."""
        try:
            data = os.read(self.reading, _READ_BYTES)
        except BlockingIOError:
            return True
        self.total += len(data)
        self.kept += data[: max(0, self._keep - len(self.kept))]
        return bool(data)


class Execution:
    """Runs `program` once; its usage is added to the server's. `stdin`: input, or a socket for
    input and output."""

    def __init__(self, server: _Server, program: Program, stdin: bytes | socket.socket) -> None:
        self._server = server
        self._program = program
        self._limits = program.limits
        self._stdin = stdin
        self._backend = server.backend
        self._keep = int(program.limits["output_kb"]) * 1024
        self._used = Totals(executions=1)
        self._killed_by = ""
        self._accounts = accounts = server.accounts
        self._cpu_before = accounts.cpu_seconds()
        self._io_before = accounts.bytes_moved()
        self._peaks_before = accounts.peak_memory(), accounts.peak_tasks()
        self._kills_before = accounts.memory_kills()

    def run(self) -> dict[str, Any]:
        """Until the program and all processes that it started have ended."""
        self._outputs = [_Output(self._keep), _Output(self._keep)]
        began = time.monotonic()
        if self._server.cancel_waits():  # it came together with the program
            self._killed_by = "cancelled"
        pid = self._fork()
        pidfd = os.pidfd_open(pid)
        try:
            self._watch(pidfd, began)
        finally:
            os.close(pidfd)
            if self._killed_by:
                os.kill(pid, signal.SIGKILL)
        status, usage = self._bury(pid)
        self._used.wall_seconds = time.monotonic() - began
        return self._record(status, usage)

    def _fork(self) -> int:
        out, error = self._outputs
        if isinstance(self._stdin, bytes):
            stdin, stdout = _readable(self._stdin), out.writing
        else:
            stdin = stdout = self._stdin.detach()
        pid = os.fork()
        if pid == 0:
            become(self._program, (stdin, stdout, error.writing), self._backend.enclose)
        os.close(stdin)
        for output in self._outputs:
            os.close(output.writing)
        return pid

    def _watch(self, pidfd: int, began: float) -> None:
        poll, channel = select.poll(), self._server.channel.fileno()
        for descriptor in (pidfd, channel, *(output.reading for output in self._outputs)):
            poll.register(descriptor, select.POLLIN)
        by_descriptor = {output.reading: output for output in self._outputs}
        wall_end = began + float(self._limits["wall_seconds"])
        next_look = began + FIRST_LOOK_SECONDS
        while not self._killed_by:
            now = time.monotonic()
            if now >= wall_end:
                self._killed_by = "wall"
                return
            if now >= next_look:
                self._look()
                next_look = time.monotonic() + LOOK_SECONDS
                continue
            wait = min(next_look, wall_end) - now
            for descriptor, _ in poll.poll(max(1, round(wait * 1000))):
                if descriptor == pidfd:
                    return
                if descriptor == channel:
                    if self._server.hears_cancel():
                        self._killed_by = "cancelled"
                elif not by_descriptor[descriptor].take():
                    poll.unregister(descriptor)
            if max(o.total for o in self._outputs) > self._keep * OUTPUT_KILL_FACTOR:
                self._killed_by = "output"

    def _look(self) -> None:
        limits, used = self._limits, self._used
        memory_limit = int(limits["memory_mb"]) * MB
        seen = sample(self._backend.programs(), memory_limit)
        disk, inodes = self._backend.used()
        used.peak_memory = max(used.peak_memory, seen.memory_bytes)
        used.peak_processes = max(used.peak_processes, seen.processes)
        used.disk_bytes = max(used.disk_bytes, disk)
        cpu_seconds = self._accounts.cpu_seconds(seen.cpu_seconds) - self._cpu_before
        for reason, passed in (
            ("memory", seen.memory_bytes + self._backend.kernel_bytes() > memory_limit),
            ("cpu", cpu_seconds > float(limits["cpu_seconds"])),
            ("processes", seen.processes > int(limits["processes"])),
            ("disk", disk > int(limits["disk_mb"]) * MB),
            ("inodes", inodes > int(limits["inodes"]) + 4),
        ):
            if passed:
                self._killed_by = self._killed_by or reason

    def _bury(self, pid: int) -> tuple[int, resource.struct_rusage]:
        """Kills the program's other processes and reads their output."""
        _, status, usage = os.wait4(pid, 0)
        self._backend.kill()
        until = time.monotonic() + _DRAIN_SECONDS
        for output in self._outputs:
            os.set_blocking(output.reading, False)
            while time.monotonic() < until:
                before = output.total
                if not output.take() or output.total == before:
                    break
            os.close(output.reading)
        return status, usage

    def _record(self, status: int, usage: resource.struct_rusage) -> dict[str, Any]:
        used = self._used
        code = os.waitstatus_to_exitcode(status)
        if not self._killed_by and code == -signal.SIGXCPU:
            self._killed_by = "cpu"
        if not self._killed_by and self._accounts.memory_kills() > self._kills_before:
            self._killed_by = "memory"
        used.cpu_seconds = self._accounts.cpu_seconds() - self._cpu_before
        read, written = self._accounts.bytes_moved()
        used.read_bytes = max(0, read - self._io_before[0])
        used.written_bytes = max(0, written - self._io_before[1])
        used.output_bytes = sum(output.total for output in self._outputs)
        used.cpu_exact = self._accounts.cpu_exact
        used.peak_memory = max(used.peak_memory, usage.ru_maxrss * 1024)
        used.peak_processes = max(used.peak_processes, 1)
        memory, tasks = self._accounts.peak_memory(), self._accounts.peak_tasks()
        if memory > self._peaks_before[0]:  # reached by this program, else by an earlier one
            used.peak_memory, used.memory_exact = memory, True
        if tasks > self._peaks_before[1]:
            used.peak_processes = tasks
        used.disk_bytes = max(used.disk_bytes, self._backend.used()[0])
        if self._killed_by:
            used.killed = {self._killed_by: 1}
        self._server.totals.add(used)
        out, error = self._outputs
        return {
            "exit": code if code >= 0 and not self._killed_by else None,
            "signal": -code if code < 0 else None,
            "killed_by": self._killed_by,
            "stdout": bytes(out.kept),
            "stderr": bytes(error.kept),
            "truncated": any(output.total > len(output.kept) for output in self._outputs),
            "usage": used.as_record(),
        }


def _readable(data: bytes) -> int:
    """Sealed, so that programs cannot write to it."""
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    linux.seal(descriptor)
    return descriptor


_RECEIVE_BYTES = 2**18
_LONGEST_PLACE = 4096
_BACKLOG = 64


class Refused(Exception): ...


def serve(channel: socket.socket, make_backend: Callable[[], Backend]) -> NoReturn:
    status = 1
    backend = None
    try:
        signal.signal(signal.SIGTERM, lambda *_: _hang_up(channel))
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        backend = make_backend()
        _Server(channel, backend).run()
        status = 0
    except ConnectionError:
        status = 0  # the other end is gone: nothing to report
    except Exception as error:  # noqa: BLE001 - the last frame: whatever it is, say it and end
        sys.__excepthook__(type(error), error, error.__traceback__)
        sys.stderr.flush()
    finally:
        if backend is not None:
            backend.kill()
        try:
            channel.close()
        finally:
            os._exit(status)


def _hang_up(channel: socket.socket) -> None:
    """For a signal handler: an exception there could interrupt the clean-up."""
    try:
        channel.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is closed already
        return


class _Server:
    def __init__(self, channel: socket.socket, backend: Backend) -> None:
        self.channel = channel
        self.backend = backend
        self.totals = Totals()
        self.accounts = backend.accounts()
        self._frames = Frames()
        self._waiting: list[list[Any]] = []
        self._env: dict[str, str] = {}
        self._limits: dict[str, Any] = {}
        self._handing_out: list[int] = []
        self._starting: Execution | None = None
        self._ended: dict[str, Any] = {}

    def run(self) -> None:
        while True:
            while not self._waiting:
                self._receive()
            request = self._waiting.pop(0)
            if request[0] == "cancel":  # its program has ended meanwhile
                continue
            try:
                answer = ["ok", self._perform(request)]
            except Refused as error:
                answer = ["error", "input", str(error)]
            except OSError as error:
                named = isinstance(error.filename, (str, bytes))  # else a descriptor's number
                place = os.fsencode(error.filename if named else "").decode(errors="replace")
                words = f"{place[:_LONGEST_PLACE]}: {error.strerror}"
                answer = ["error", "input", words.strip(": ")]
            self._send(*answer)
            if self._starting is not None:
                execution, self._starting = self._starting, None
                self._ended = self._run(execution)

    def _perform(self, request: list[Any]) -> Any:
        match request:
            case ["run", dict() as program]:
                return self._run_program(program)
            case ["read", str() as path, int() as most]:
                return _read(self._place(path), most)
            case ["total"]:
                return self.totals.as_record()
            case ["ended"]:
                return self._ended
            case ["setup", dict() as spec]:
                self._set_up(spec)
            case ["write", str() as path, bytes() as data]:
                _write(self._place(path), data)
            case ["lead_out"]:
                self._lead_out()
            case ["start", dict() as program]:
                self._start(program)
            case _:
                raise ValueError(f"an unknown request {request[0]!r}")
        return None

    def _set_up(self, spec: dict[str, Any]) -> None:
        self._limits = spec["limits"]
        places = {"TMPDIR": self.backend.temporary, "HOME": self.backend.work}
        self._env = {**self.backend.variables, **places, **spec["env"]}
        self.backend.furnish(int(self._limits["disk_mb"]) * MB, int(self._limits["inodes"]))
        os.chdir(self.backend.work)
        if spec["archive"]:
            _unpack(spec["archive"], self.backend.work)
        for path, data in spec["files"].items():
            _write(self._place(path), data)
        linux.prctl(linux.PR_SET_DUMPABLE, 0)

    def _lead_out(self) -> None:
        """Hands out a listening socket, which later programs take for their HTTP proxy."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        led = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), url)
        here = dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1,localhost")
        self._env = {**led, **here, **self._env}
        self._handing_out.append(listener.detach())

    def _run_program(self, wanted: dict[str, Any]) -> dict[str, Any]:
        limits = _tighter(self._limits, wanted["limits"])
        program = self._program(wanted, wanted["cwd"], limits)
        return self._run(Execution(self, program, wanted["stdin"]))

    def _start(self, wanted: dict[str, Any]) -> None:
        """The program may run for `wall_seconds`, unlike others."""
        limits = {**self._limits, "wall_seconds": wanted["wall_seconds"]}
        program = self._program(wanted, "/work", limits)
        ours, theirs = socket.socketpair()
        self._handing_out.append(theirs.detach())
        self._starting = Execution(self, program, ours)

    def _program(self, wanted: dict[str, Any], cwd: str, limits: dict[str, Any]) -> Program:
        env = {**self._env, **wanted["env"]}
        return Program(wanted["argv"], wanted.get("code"), self._place(cwd), env, limits)

    def _run(self, execution: Execution) -> dict[str, Any]:
        try:
            return execution.run()
        except ConnectionError:
            raise
        except OSError as error:  # the machine's fault, not the caller's: the sandbox is lost
            raise RuntimeError(f"the program could not be run: {error}") from error

    def hears_cancel(self) -> bool:
        self._receive()
        return self.cancel_waits()

    def cancel_waits(self) -> bool:
        return any(request[0] == "cancel" for request in self._waiting)

    def _receive(self) -> None:
        data = self.channel.recv(_RECEIVE_BYTES)
        if not data:
            raise ConnectionError("the outside is gone")
        self._waiting += self._frames.feed(data)

    def _send(self, *parts: Any) -> None:
        handing_out, self._handing_out = self._handing_out, []
        frame = encode(*parts)
        if handing_out:  # with the first byte
            socket.send_fds(self.channel, [frame[:1]], handing_out)
            frame = frame[1:]
        for descriptor in handing_out:
            os.close(descriptor)
        self.channel.sendall(frame)

    def _place(self, path: str) -> str:
        """`path` as the server sees it; relative ones and those below /work: workspace."""
        if "\0" in path:
            raise Refused("a path contains a NUL character")
        if path == "/work" or path.startswith("/work/"):
            return self.backend.work + path.removeprefix("/work")
        return os.path.join(self.backend.work, path)


def _tighter(own: dict[str, Any], wanted: dict[str, Any] | None) -> dict[str, Any]:
    if wanted is None:
        return own
    return {name: min(value, wanted[name]) for name, value in own.items()}


def _read(path: str, most: int) -> bytes:
    """Without blocking, as on a FIFO or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    with os.fdopen(descriptor, "rb") as file:
        _check_regular(descriptor, path)
        return file.read(min(most, MAX_FRAME_BYTES - 1024))


def _write(path: str, data: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    descriptor = os.open(path, flags, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        _check_regular(descriptor, path)
        file.write(data)


def _check_regular(descriptor: int, path: str) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise Refused(f"{path} is not a regular file")


def _unpack(archive: bytes, directory: str) -> None:
    import tarfile  # for the few programs that come with an archive

    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            if hasattr(tarfile, "data_filter"):
                tar.extractall(directory, filter="data")
            else:  # Python older than 3.11.4, as in Debian 12
                _check_members(tar)
                tar.extractall(directory)
    except (OSError, Refused):
        raise
    except Exception as error:  # whatever a broken archive makes tarfile raise
        raise Refused(f"the archive cannot be unpacked: {error}") from error


def _check_members(tar: tarfile.TarFile) -> None:
    """Refuses devices, and names and links that lead out of the directory."""
    for member in tar.getmembers():
        inside = "" if member.islnk() else os.path.dirname(member.name)
        for place in (member.name, os.path.join(inside, member.linkname)):
            if os.path.isabs(place) or os.path.normpath(place).split("/")[0] == "..":
                raise Refused(f"the archive's member {member.name} leads out of it")
        if member.isdev():
            raise Refused(f"the archive's member {member.name} is a device")
