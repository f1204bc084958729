"""A real Docker engine for the tests: one for all processes of a run of tests.

In: what `make docker-engine` made. Out: the address of an engine and the name of an image with
Python, pip, venv and git. An engine that runs already and has `python:X.Y` (or the image that
ENVSERVER_TEST_IMAGE names) is taken as it is. Otherwise root starts one of its own in a temporary
folder; its containers may use the networks `none` and `host`, and one of their own that leads
nowhere, for published ports. A keeper ends it by its process id, and removes all of it,
as soon as the run of tests has ended, however it ended.
"""

import contextlib
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from envserver.sandbox import linux
from envserver.sandbox.docker import find_engine

from .commands import until
from .docker_setup import BASE, CONFIG, OWN_IMAGE
from .waiting import PATIENCE

_IMAGE: Final = "envserver-test-base"
_DOCKERD: Final = ("dockerd", "--iptables=false", "--ip6tables=false", "--ip-forward=false")
_CHANGES: Final = ("--change", "ENV LANG=C.UTF-8", "--change", 'CMD ["python3"]')


@dataclass(frozen=True)
class Engine:
    """An engine that answers, or the reason why there is none.

    Args:
        host: its address as DOCKER_HOST has it; "": the one that the docker command finds.
        python_image: an image with Python, pip, venv and git.
        refused: why no engine could be started; "" if one runs.
        missing: what would have to be installed for one; "" if nothing.
    """

    host: str = ""
    python_image: str = ""
    refused: str = ""
    missing: str = ""

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables with which Docker's command finds it, and its plugins."""
        found = {"DOCKER_HOST": self.host} if self.host else {}
        if (CONFIG / "cli-plugins").exists():
            found["DOCKER_CONFIG"] = str(CONFIG)
        return found | {"DOCKER_BUILDKIT": "1"}

    def run(self, *words: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
        """Runs Docker's command; what it prints is text."""
        environ = {**os.environ, **self.variables}
        return subprocess.run(  # type: ignore[call-overload, no-any-return]
            ["docker", *words], **{"env": environ, "capture_output": True, "text": True, **options}
        )

    def output(self, *words: str | Path) -> str:
        """The standard output of Docker's command, which must succeed."""
        done = self.run(*words)
        assert done.returncode == 0, f"docker {' '.join(map(str, words))}\n{done.stderr}"
        return done.stdout


@contextlib.contextmanager
def engine() -> Iterator[Engine]:
    """The engine of this run of tests; the first that asks starts it."""
    yield _running_already() or _shared()


def end() -> None:
    """Ends the engine that this run of tests started, if it did, and waits until all is removed."""
    folder = _folder(os.getpid())
    with contextlib.suppress(OSError, ValueError):
        keeper = os.pidfd_open(int((folder / "keeper").read_text()))
        signal.pidfd_send_signal(keeper, signal.SIGTERM)
        select.select([keeper], [], [], PATIENCE)


def _running_already() -> Engine | None:
    image = os.environ.get("ENVSERVER_TEST_IMAGE", OWN_IMAGE)
    with contextlib.suppress(OSError):
        find_engine(image)
        return Engine(host=os.environ.get("DOCKER_HOST", ""), python_image=image)
    return None


def _shared() -> Engine:
    if not BASE.exists() or shutil.which("dockerd") is None:
        return Engine(missing="make docker-engine", refused="no engine runs")
    if os.geteuid() != 0:
        return Engine(refused="only root can start an engine")
    # A run's main process is the parent of the processes that pytest-xdist starts.
    run = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    folder = _folder(run)
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "result").exists():
            _start_keeper(folder, run)
        refused = (folder / "result").read_text()
    return Engine(host=f"unix://{folder}/socket", python_image=_IMAGE, refused=refused)


def _folder(run: int) -> Path:
    return Path(tempfile.gettempdir()) / f"envserver-docker-{run}"


def _start_keeper(folder: Path, run: int) -> None:
    """Returns when the engine answers and has its image, or has ended."""
    with (folder / "log").open("w") as log:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "support.docker_engine", str(folder), str(run)],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    until((folder / "result").exists, (folder / "log").read_text, alive=keeper)


def _keep(folder: Path, run: int) -> None:
    """Starts an engine, says how that went in the file `result`, and ends it with the run."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ended = os.pidfd_open(run)
    keeper = os.getpid()
    (folder / "keeper").write_text(str(keeper))
    bridge = _bridge(run)
    daemon = subprocess.Popen(
        [
            *(*_DOCKERD, "--bridge", bridge or "none"),
            *("--host", f"unix://{folder}/socket", "--pidfile", str(folder / "pid")),
            *("--data-root", str(folder / "data"), "--exec-root", str(folder / "exec")),
        ],
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: linux.die_with(keeper, signal.SIGTERM),
    )
    try:
        part = folder / "result.part"
        part.write_text(_prepare(folder, daemon))
        part.rename(folder / "result")
        select.select([ended], [], [])
    finally:
        _end(folder, daemon)
        if bridge:
            _ip("link", "delete", bridge)


def _bridge(run: int) -> str:
    """Makes a bridge of this engine's own; returns its name, or "" where that is not possible."""
    name = f"envs{run}"
    # 198.18.0.0/15 is for measurements between networks: nobody has hosts there.
    made = (
        _ip("link", "add", name, "type", "bridge")
        and _ip("address", "add", f"198.18.{run % 256}.1/24", "dev", name)
        and _ip("link", "set", name, "up")
    )
    return name if made else ""


def _ip(*words: str) -> bool:
    program = shutil.which("ip")
    return program is not None and subprocess.run([program, *words], check=False).returncode == 0


def _prepare(folder: Path, daemon: subprocess.Popen[bytes]) -> str:
    """Returns why the engine cannot be used, or "" once it has its image."""
    own = Engine(host=f"unix://{folder}/socket")
    deadline = time.monotonic() + PATIENCE
    while own.run("version").returncode:
        if daemon.poll() is not None or time.monotonic() > deadline:
            return f"dockerd does not start: {(folder / 'log').read_text()[-600:]}"
        time.sleep(0.1)
    with subprocess.Popen(["zstd", "-dcq", str(BASE)], stdout=subprocess.PIPE) as base:
        done = own.run("import", *_CHANGES, "-", _IMAGE, stdin=base.stdout)
    if done.returncode == 0:  # the kernel may refuse containers where it lets an engine run
        done = own.run("run", "--rm", "--network", "none", _IMAGE, "python3", "-c", "")
    return done.stderr.strip()


def _end(folder: Path, daemon: subprocess.Popen[bytes]) -> None:
    own = Engine(host=f"unix://{folder}/socket")
    if daemon.poll() is None:
        left = own.run("ps", "--all", "--quiet").stdout.split()
        if left:
            own.run("rm", "--force", "--volumes", *left)
        daemon.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(60)
        daemon.kill()
        daemon.wait()
    for place in _mounts_below(folder):
        linux.unmount(place)
    shutil.rmtree(folder)


def _mounts_below(folder: Path) -> list[str]:
    """What an engine leaves mounted: the namespace of the network `host`; the innermost first."""
    places = (line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines())
    return [place for place in places if place.startswith(f"{folder}/")][::-1]


if __name__ == "__main__":
    _keep(Path(sys.argv[1]), int(sys.argv[2]))
