"""The server's side of the supervisor: chooses the backend, starts the process, keeps it alive.

The kernel ends a supervisor with the thread that started it, so the loop must run in one that
stays.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec
import structlog
from envserver_records.errors import ConfigError
from envserver_records.waiting import cancel_and_wait

from ..settings.config import LocalSandboxConfig
from . import bubblewrap, landlock
from .docker import Engine, find_engine, new_prefix, remove_leftovers
from .places import folder_for_sockets
from .probe import LANDLOCK_ENOUGH, WEAKNESSES, ProbeReport, examine, unavailable
from .supervisor import SupervisorBoot, start_command

# `auto` tries bubblewrap (where it is installed), namespaces, then Landlock, and takes the first of
# which every check holds; one that is weaker than those before is taken with a warning that names
# what it does not hold. Docker and unsafe-local are only taken by name.

ORDER = ("bubblewrap", "namespace", "landlock")


def missing(backend: str, *, by_name: bool) -> ProbeReport | None:
    """The report on a backend that plainly cannot be, before anything is started."""
    if backend == "bubblewrap" and bubblewrap.installed() is None:
        return unavailable(backend, "bwrap is not installed")
    if backend == "landlock":
        version = landlock.abi()
        if version == 0:
            return unavailable(backend, "this kernel has no Landlock")
        if version < LANDLOCK_ENOUGH and not by_name:
            return unavailable(backend, f"Landlock version {version} cannot hold signals back")
    return None


def announce(report: ProbeReport, failed: Sequence[ProbeReport]) -> None:
    """Warns if the chosen backend is weak or if a better one failed."""
    tried = {each.backend: each.failure for each in failed}
    if report.backend in WEAKNESSES:
        lacks = ", ".join(WEAKNESSES[report.backend])
        facts = {"backend": report.backend, "does_not_hold": lacks, "failed": tried}
        _log.warning("sandbox_backend_is_weak", **facts)
        return
    broken = {backend: why for backend, why in tried.items() if why != "bwrap is not installed"}
    if broken:
        _log.warning("sandbox_backend_does_not_work", failed=broken, taken=report.backend)
    _log.info("sandbox_backend", backend=report.backend)


def nothing_works(failed: Sequence[ProbeReport]) -> ConfigError:
    reasons = "; ".join(f"{report.backend}: {report.failure}" for report in failed)
    steps = list(dict.fromkeys(step for report in failed for step in report.remedies))
    if all(report.backend != "docker" for report in failed):
        steps.append("Or use containers: --sandbox.backend docker.")
    return ConfigError(
        f"This machine cannot sandbox model-written programs. {reasons}.",
        hint=" ".join(steps) + " `envserver doctor` shows every check.",
    )


START_SECONDS = 30.0
_PAUSE_SECONDS = 0.2

_held: dict[tuple[str, str, tuple[str, ...]], ProbeReport] = {}
"""Reports on backends, with images and private paths, that this process has already tried."""

_log = structlog.get_logger("envserver.sandbox")


class SandboxService:
    """`async with` it: sandboxes can be opened at `address` until the end.

    `private`: paths of environments and data that are not installed; programs never see them, nor
    this process's working folder.
    """

    def __init__(self, config: LocalSandboxConfig, private: Sequence[str] = ()) -> None:
        self._config = config
        self._private = tuple(private)
        self._process: subprocess.Popen[bytes] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self.backend = ""
        self.address = ""
        self._directory = ""
        self._engine: Engine | None = None

    @property
    def private(self) -> list[str]:
        """See `system.hidden_paths`."""
        return [str(Path.cwd()), *self._private]

    async def __aenter__(self) -> Self:
        failed: list[ProbeReport] = []
        chosen = self._config.backend
        for backend in ORDER if chosen == "auto" else (chosen,):
            report = await self.attempt(backend)
            if report.works:
                announce(report, failed)
                self._keeping = asyncio.create_task(self._keep())
                return self
            await self.end()
            failed.append(report)
        raise nothing_works(failed)

    async def attempt(self, backend: str) -> ProbeReport:
        """Starts a supervisor with this backend and tries it; it runs until `end`."""
        report = missing(backend, by_name=self._config.backend != "auto")
        if report is not None:
            return report
        if backend == "docker":
            try:
                await asyncio.to_thread(self._use_engine)
            except OSError as error:
                return unavailable(backend, str(error))
        self.backend = backend
        self._directory = tempfile.mkdtemp(prefix="envserver-sandboxes-", dir=folder_for_sockets())
        self._let_users_through()
        self.address = f"{self._directory}/socket"
        try:
            await self._start()
            key = backend, self._config.docker_image, self._private
            if key not in _held:
                report = await examine(self.address, backend, self._private)
                if not report.works:
                    return report
                _held[key] = report
            return _held[key]
        except ConfigError as error:
            return unavailable(backend, error.message)
        except BaseException:
            await self.end()
            raise

    def _use_engine(self) -> None:
        wanted = self._config
        engine = find_engine(wanted.docker_image, wanted.docker_pull)
        if removed := remove_leftovers(engine):
            _log.warning("sandbox_containers_removed", of_killed_servers=len(removed))
        self._engine = msgspec.structs.replace(
            engine,
            prefix=new_prefix(),
            pull=wanted.docker_pull,
            warm=wanted.docker_warm,
            most_warm=wanted.concurrent,
            starts=wanted.docker_starts,
            starts_per_second=wanted.docker_starts_per_second,
        )

    async def __aexit__(self, *_: object) -> None:
        if self._keeping is not None:
            await cancel_and_wait(self._keeping)
        await self.end()

    async def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        boot = SupervisorBoot(
            control_fd=theirs.fileno(),
            directory=self._directory,
            concurrent=self._config.concurrent,
            warm=self._config.warm,
            backend=self.backend,
            private=self.private,
            engine=self._engine,
        )
        self._control = ours
        self._process = subprocess.Popen(  # noqa: ASYNC220 - a fork, milliseconds
            start_command("supervisor", boot),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            pass_fds=[theirs.fileno()],
            cwd="/",
            env={"LANG": "C.UTF-8"},
            start_new_session=True,
        )
        theirs.close()
        try:
            async with asyncio.timeout(START_SECONDS):
                data = await asyncio.get_running_loop().sock_recv(ours, 16)
        except TimeoutError:
            data = b""
        if data != b"up":
            raise ConfigError("The sandboxes' supervisor did not start.", hint="See its output.")

    async def _keep(self) -> None:
        """Restarts the supervisor when it has ended; its sandboxes ended with it."""
        loop = asyncio.get_running_loop()
        while True:
            await loop.sock_recv(self._control, 16)
            self._stop_process()
            _log.error("sandbox_supervisor_ended", backend=self.backend)
            await self._start_again()

    async def _start_again(self) -> None:
        """Retries until it works: the cause (no memory, no process) may pass."""
        while True:
            await asyncio.sleep(_PAUSE_SECONDS)
            try:
                await self._remove_containers()
                self._clean()
                self._make_directory()
                await self._start()
                return
            except (ConfigError, OSError) as error:
                _log.error("sandbox_supervisor_not_started", reason=str(error))
                self._stop_process()

    def _stop_process(self) -> None:
        self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    async def end(self) -> None:
        """Ends the supervisor, the zygotes and the sandboxes, and waits until they are gone."""
        if self._process is not None:
            self._control.close()  # for the supervisor, the sign to end
            try:
                await asyncio.to_thread(self._process.wait, 5.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
            await self._remove_containers()
        self._clean()

    async def _remove_containers(self) -> None:
        """Removes those that did not end with the supervisor, or not yet."""
        if self._engine is not None:
            await asyncio.to_thread(remove_leftovers, self._engine)

    def _make_directory(self) -> None:
        Path(self._directory).mkdir(mode=0o700)
        self._let_users_through()

    def _let_users_through(self) -> None:
        """Sandboxes of a root server have separate users, whose directories may be in this one."""
        if os.geteuid() == 0:
            Path(self._directory).chmod(0o711)

    def _clean(self) -> None:
        if self._directory and Path(self._directory).exists():
            command = ["rm", "-rf", "--", self._directory]  # shutil's breaks at a thousand levels
            subprocess.run(command, stderr=subprocess.DEVNULL, check=False)


async def probe(backend: str, config: LocalSandboxConfig) -> ProbeReport:
    """Tries whether `backend` works on this machine. Never raises."""
    service = SandboxService(config)
    try:
        return await service.attempt(backend)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the report is for
        return unavailable(backend, str(error) or type(error).__name__)
    finally:
        await service.end()
