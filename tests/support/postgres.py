"""A real PostgreSQL of the tests' own, for as long as a `with` lasts; it may be killed.

In: the folder of its programs. Out: an empty database. It refuses root and so runs as an ordinary
user, in a temporary folder, with fsync on, at a free port of the loopback interface.
"""

import asyncio
import contextlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import asyncpg

from envserver.sandbox import linux
from support import process_tree
from support.commands import free_port, until

_USER: Final = "envserver"
_CUT_OFF: Final = (
    "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
)

_STOP_SECONDS: Final = 30.0
_SETTINGS: Final = ("fsync=on", "synchronous_commit=on", "max_connections=60")


def find_programs(venv: Path) -> Path | None:
    """The folder with `initdb` and `postgres`: the system's, else what `make postgres` brought."""
    found = shutil.which("initdb")
    places = [Path(found).resolve().parent] if found else []
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        places.append(Path(subprocess.check_output(["pg_config", "--bindir"], text=True).strip()))
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    places += sorted(venv.glob("lib/python*/site-packages/*pgserver/pginstall/bin"))
    for place in places:
        if all((place / name).exists() for name in ("initdb", "postgres")):
            return place
    return None


class Postgres:
    """A server that was made by `running_postgres`."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.log = folder / "log"
        self._programs = programs
        self._password = secrets.token_hex(8)
        self._process: subprocess.Popen[bytes] | None = None
        # The server ends with the thread that began it: not one that a test's loop ends. It also
        # has no loop, as the thread of a test may.
        self._thread = ThreadPoolExecutor(1, "postgres")

    @property
    def pid(self) -> int:
        """Of the postmaster."""
        assert self._process is not None
        return self._process.pid

    def url(self) -> str:
        return f"postgresql://{_USER}:{self._password}@127.0.0.1:{self.port}/postgres"

    def emptied(self) -> str:
        """The URL of its one database, now without other clients and without tables."""
        self.execute(f"{_CUT_OFF}; DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        return self.url()

    def execute(self, statements: str) -> str:
        """Runs them one after the other; what the last one says that it did."""

        async def ask() -> str:
            connection = await asyncpg.connect(self.url())
            try:
                return str(await connection.execute(statements))
            finally:
                await connection.close()

        return self._thread.submit(lambda: asyncio.run(ask())).result()

    def create(self) -> None:
        """Makes the folder of its data."""
        secret = self.folder / "password"
        secret.write_text(self._password)
        secret.chmod(0o644)  # the folder around it is closed to others
        argv: list[Path | str] = [self._programs / "initdb", "--pgdata", self.folder / "data"]
        argv += ["--username", _USER]
        argv += ["--pwfile", secret, "--auth", "scram-sha-256", "--no-sync"]
        argv += ["--encoding", "UTF8", "--no-locale"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, **_ordinary())
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self) -> None:
        """Begins on the same data and port, and returns when it answers."""
        assert self._process is None
        argv: list[Path | str] = [self._programs / "postgres", "-D", self.folder / "data"]
        argv += ["-p", str(self.port), "-h", "127.0.0.1", "-k", self.folder]
        argv += [word for setting in _SETTINGS for word in ("-c", setting)]
        parent_pid = os.getpid()

        def begin() -> subprocess.Popen[bytes]:
            with self.log.open("ab") as log:
                return subprocess.Popen(
                    argv,
                    stdout=log,
                    stderr=log,
                    preexec_fn=lambda: linux.die_with(parent_pid, signal.SIGQUIT),
                    **_ordinary(),
                )

        self._process = self._thread.submit(begin).result()
        until(self._answers, self.log.read_text, alive=self._process)

    def _answers(self) -> bool:
        try:
            return bool(self.execute("SELECT 1"))
        except (OSError, asyncpg.PostgresError):
            return False

    def kill(self) -> None:
        """Ends it and all that it began by SIGKILL, as when a machine dies."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)  # it begins no more
        for pid in [*process_tree.descendants(self.pid), self.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def stop(self, by: signal.Signals = signal.SIGINT) -> None:
        """Ends it in order; clients are cut off. Nothing happens when it has ended.

        Args:
            by: SIGQUIT does not wait for what it has in memory to be written.
        """
        if self._process is None:
            return
        self._process.send_signal(by)
        try:
            self._process.wait(_STOP_SECONDS)
            self._process = None
        except subprocess.TimeoutExpired:
            self.kill()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing of it runs meanwhile; connections stay."""
        stopped = [self.pid, *process_tree.descendants(self.pid)]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    @contextlib.contextmanager
    def small_disk(self, megabytes: int) -> Iterator[None]:
        """Tables that are made meanwhile lie on a disk of this size, and must be gone at the end.

        Raises:
            PermissionError: only a root that may mount can do this.
        """
        disk = self.folder / "disk"
        disk.mkdir()
        owner = self.folder.stat()
        options = f"size={megabytes}m,mode=0700,uid={owner.st_uid},gid={owner.st_gid}"
        linux.mount("tmpfs", str(disk), "tmpfs", data=options)
        try:
            self.execute(f"CREATE TABLESPACE small LOCATION '{disk}'")
            self.execute("ALTER ROLE CURRENT_USER SET default_tablespace = small")
            yield
            self.execute("ALTER ROLE CURRENT_USER RESET default_tablespace")
            self.execute("DROP TABLESPACE small")
        finally:
            linux.unmount(str(disk))
            disk.rmdir()

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None


@contextlib.contextmanager
def running_postgres(programs: Path) -> Iterator[Postgres]:
    """A server with empty data, ended and removed at the end."""
    with _open_folder() as folder:
        server = Postgres(_reachable(programs, folder), folder)
        server.create()
        server.start()
        try:
            yield server
        finally:
            server.stop(signal.SIGQUIT)


@contextlib.contextmanager
def _open_folder() -> Iterator[Path]:
    """A new folder of the user who will run the server; short, because a socket lies in it."""
    place = next(Path(p) for p in (tempfile.gettempdir(), "/tmp", "/var/tmp") if _is_open(Path(p)))
    with tempfile.TemporaryDirectory(prefix="pg-", dir=place, ignore_cleanup_errors=True) as made:
        if os.geteuid() == 0:
            os.chown(made, _nobody().pw_uid, _nobody().pw_gid)
        yield Path(made)


def _is_open(path: Path) -> bool:
    return path.is_dir() and all(p.stat().st_mode & 0o001 for p in (path, *path.parents))


def _reachable(programs: Path, folder: Path) -> Path:
    """The programs; those of a wheel are copied where only root can get at them."""
    if os.geteuid() != 0 or _is_open(programs):
        return programs
    package, site = programs.parents[1], programs.parents[2]
    for part in (package, site / f"{package.name}.libs"):
        shutil.copytree(part, folder / part.name, symlinks=True)
    return folder / programs.relative_to(site)


def _ordinary() -> Mapping[str, Any]:
    shared: dict[str, Any] = {"env": {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C"}}
    shared |= {"cwd": "/"}
    if os.geteuid() == 0:
        shared |= {"user": _nobody().pw_uid, "group": _nobody().pw_gid, "extra_groups": []}
    return shared


def _nobody() -> pwd.struct_passwd:
    """An ordinary user with an account: without one, initdb refuses."""
    return pwd.getpwnam("nobody")
