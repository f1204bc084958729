# ruff: noqa: E501 - whole programs in strings
"""The host that hostile programs reach for: secrets, a victim, listeners; and what came of it.

Evidence is what the host sees: a secret's random word in an output, a mark that was heard or that a
process or file of the host bears, a victim that is not as it was. Where the host can see nothing (a
system call that the kernel accepted) the program says so itself: it has no reason to lie about that.
"""

from __future__ import annotations

import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

from support.process_tree import alive_with

from .program import Told

AS_IT_WAS = "as it was"
_LONG_AGO = 10**9
PROJECT = Path(__file__).parents[2]
_VICTIM = """\
import os, signal, sys
def hear(number, frame):
    os.write(1, f"{number}\\n".encode())
for number in (signal.SIGWINCH, signal.SIGURG, signal.SIGCHLD, signal.SIGCONT):
    signal.signal(number, hear)
os.write(1, b"ready\\n")
sys.stdin.read()
"""


def random_secret(kind: str) -> str:
    return f"CANARY-{kind}-{secrets.token_hex(12)}"


class Host:
    """`with` it: everything stands in `folder`, which anybody may look into.

    Args:
        secrets: further words that no program may see.
        service: path of the sandboxes' own socket.
    """

    def __init__(self, folder: Path, *, secrets: list[str], service: str) -> None:
        self.folder = folder
        self.open = folder / "open"
        self._service = service
        self._secrets = [word.encode() for word in secrets] + [_grader_line()]
        self._words = {name: random_secret(name) for name in ("file", "dotenv", "argv", "variable")}
        self._secrets += [word.encode() for word in self._words.values()]
        self._heard = b""

    def __enter__(self) -> Self:
        self.open.mkdir()
        self.open.chmod(0o777)
        (self.folder / "secret.txt").write_text(self._words["file"])
        (self.folder / ".env").write_text(self._words["dotenv"])
        self._listen()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._listener.join()
        for one in self._sockets:
            one.close()

    def victim(self) -> Victim:
        return Victim(self.folder, self._words["argv"], self._words["variable"])

    def told(self, mark: str, victim: Victim | None) -> Told:
        """What a program knows of this host, and may do its worst with."""
        writable = self.folder / f"writable-{mark}"
        writable.write_text(AS_IT_WAS)
        writable.chmod(0o666)
        os.utime(writable, (_LONG_AGO, _LONG_AGO))
        return {
            "MARK": mark,
            "PORT": self._port,
            "FREE_PORT": _free_port(),
            "ABSTRACT": self._abstract,
            "SOCKET": str(self.folder / "socket"),
            "SERVICE": self._service,
            "VICTIM": victim.pid if victim else os.getpid(),
            "SERVER": os.getpid(),
            "SECRET_FILE": str(self.folder / "secret.txt"),
            "WRITABLE_FILE": str(writable),
            "FOLDER": str(self.open),
            "PROJECT": str(PROJECT),
            "HOME_OF_SERVER": str(Path("~").expanduser()),
        }

    def secrets_in(self, data: bytes) -> list[str]:
        return [f"saw the secret {word!r}" for word in self._secrets if word in data]

    def traces_of(self, mark: str) -> list[str]:
        """What a program with that mark has done to the host; what it left is removed."""
        traces = []
        if mark.encode() in self._heard:
            traces.append("the host heard it")
        for pid in alive_with(mark):
            traces.append(f"process {pid} lives on")
            os.kill(pid, signal.SIGKILL)
        for place in ("/tmp", "/var/tmp", "/dev/shm", "/work", self.open, PROJECT):
            for found in Path(place).glob(f"{mark}*") if Path(place).is_dir() else ():
                traces.append(f"left {found}")
                _remove(found)
        return traces

    def changes_by(self, mark: str) -> list[str]:
        """What is not as it was of the file that it was told."""
        file = self.folder / f"writable-{mark}"
        if not file.exists() or file.read_text() != AS_IT_WAS:
            return ["a file of the host was written"]
        state = file.stat()
        if (state.st_mode & 0o777, state.st_mtime) != (0o666, _LONG_AGO):
            return ["a file of the host was changed"]
        return []

    def _listen(self) -> None:
        self._abstract = f"host-{secrets.token_hex(6)}"
        self._port = _free_port()
        wanted: list[tuple[int, int, object]] = [
            (socket.AF_UNIX, socket.SOCK_STREAM, f"\0{self._abstract}"),
            (socket.AF_UNIX, socket.SOCK_STREAM, str(self.folder / "socket")),
        ]
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            wanted += [(family, kind, (address, self._port)) for kind in _INTERNET_KINDS]
        self._sockets = []
        for family, kind, address in wanted:
            one = socket.socket(family, kind)
            self._sockets.append(one)
            try:
                one.bind(address)
            except OSError:  # a machine without IPv6
                continue
            if kind == socket.SOCK_STREAM:
                one.listen()
        (self.folder / "socket").chmod(0o777)
        self._done = threading.Event()
        self._listener = threading.Thread(target=self._hear, daemon=True)
        self._listener.start()

    def _hear(self) -> None:
        waiting = list(self._sockets)
        while not self._done.is_set():
            for one in select.select(waiting, [], [], 0.1)[0]:
                if one in self._sockets and one.type == socket.SOCK_STREAM:
                    waiting.append(one.accept()[0])
                    continue
                data = one.recv(65536)
                self._heard += data
                if not data and one not in self._sockets:
                    waiting.remove(one)
                    one.close()


class Victim:
    """A process of the host with secrets; `with` it, then ask for `harm`."""

    def __init__(self, folder: Path, argument: str, variable: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _VICTIM, argument],
            env={"API_KEY": variable},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self._process.pid
        assert self._read() == "ready"
        self._state = self._look()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def harm(self) -> list[str]:
        if self._process.poll() is not None:
            return ["a process of the host was ended"]
        found = []
        assert self._process.stdout is not None
        if select.select([self._process.stdout], [], [], 0)[0]:
            found.append(f"a process of the host heard signal {self._read()}")
        if self._look() != self._state:
            found.append("a process of the host was changed")
        return found

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode().strip()

    def _look(self) -> tuple[object, ...]:
        """Who traces it, its processors, its limits, its priority, whether it is stopped."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        words = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        return (
            words["TracerPid"],
            words["Cpus_allowed"],
            Path(f"/proc/{self.pid}/limits").read_text(),
            os.getpriority(os.PRIO_PROCESS, self.pid),
            words["State"][0] in "Tt",
        )


_INTERNET_KINDS = (socket.SOCK_STREAM, socket.SOCK_DGRAM)


def children() -> dict[int, str]:
    """The command lines of this process's children: it inherits every orphan (it is a subreaper)."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return {}
    pids = [
        pid
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]
    return {int(pid): Path(f"/proc/{pid}/cmdline").read_text()[:200] for pid in pids}


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _grader_line() -> bytes:
    """Words of a file that decides about rewards: a program that sees them has seen the graders."""
    return (PROJECT / "environments/envserver_environments/math/scoring.py").read_bytes()[:80]


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
