"""Tries whether a backend works on this machine: runs programs in it that try to get out.

It takes about a second and never raises: what goes wrong is a check that does not hold.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from envserver_records.records import ExecResult, SandboxLimits, SandboxSpec

from ..sandbox_interface import Sandbox
from . import landlock
from .client import SandboxClient
from .places import folder_for_sockets
from .system import OUR_PACKAGES, environment_packages, package_places, shown_roots

_MOST_FILES = 2000
"""Files tried in each package or folder, so that a large data set does not delay the start."""
_FACTS = "probe-facts.json"

_LOOK = f"""
import importlib, json, sys
facts = json.load(open({_FACTS!r}))
seen = []
for name in facts["modules"]:
    try:
        if importlib.import_module(name).__file__ is None:
            continue  # a namespace package: the name of a folder whose modules cannot be read
    except (ImportError, OSError):  # some backends show names of files that cannot be read
        continue
    except Exception:
        pass
    seen.append(f"import {{name}}")
for entry in sys.path:
    twins = entry, entry.replace("/lib/", "/lib64/"), entry.replace("/lib64/", "/lib/")
    facts["files"] += [f"{{twin}}/{{name}}" for twin in twins for name in facts["packaged"]]
for path in dict.fromkeys(facts["files"]):
    try:
        with open(path, "rb") as file:
            file.read(1)
    except (OSError, ValueError):
        continue
    seen.append(path)
print(json.dumps(seen[:5]))
"""


async def visible_graders(sandbox: Sandbox, private: Sequence[str]) -> tuple[ExecResult, list[str]]:
    """Looks for environments in `sandbox`, from a new Python and from the warm one."""
    packages = {name: package_places(name) for name in environment_packages()}
    facts = {
        "modules": list(packages),
        "packaged": [name for places in packages.values() for name in _relative(places)],
        "files": [path for place in _all(packages, private) for path in _files(place)],
    }
    await sandbox.write(_FACTS, json.dumps(facts).encode())
    warm = await sandbox.run_python(_LOOK)
    if not warm.ok:
        return warm, []
    facts["modules"] = [*OUR_PACKAGES, *packages]  # the warm one has modules of ours in memory
    await sandbox.write(_FACTS, json.dumps(facts).encode())
    cold = await sandbox.exec(["python3", "-c", _LOOK])
    return cold, [thing for each in (warm, cold) if each.ok for thing in json.loads(each.stdout)]


def _all(packages: dict[str, set[str]], private: Sequence[str]) -> list[str]:
    return [*(place for places in packages.values() for place in places), *private]


def _relative(places: set[str]) -> Iterator[str]:
    """The files of a package, from the directory that it is imported from."""
    for place in places:
        for path in _files(place):
            yield str(Path(path).relative_to(Path(place).parent))


def _files(place: str) -> list[str]:
    """The files in a folder, except for those of a Python in it; or the file itself."""
    if Path(place).is_file():
        return [place]
    return list(itertools.islice(_walk(place, shown_roots()), _MOST_FILES))


def _walk(folder: str, shown: set[str]) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        if parent in shown:
            folders.clear()
            continue
        folders[:] = [name for name in folders if name not in ("__pycache__", ".git")]
        yield from (f"{parent}/{name}" for name in names)


_APPARMOR = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
_CLONE = Path("/proc/sys/kernel/unprivileged_userns_clone")
_MOST = Path("/proc/sys/user/max_user_namespaces")

LANDLOCK_ENOUGH = 6
"""The first version of Landlock that keeps programs from signalling the server."""


def remedies(backend: str) -> list[str]:
    """What to do if a backend does not work here, likeliest first. Empty only for unsafe-local."""
    match backend:
        case "bubblewrap":
            return ["Install bubblewrap (apt install bubblewrap).", *_user_namespaces()]
        case "namespace":
            return [*_user_namespaces(), *_reachable_python()]
        case "landlock":
            return [*_landlock(), *_reachable_python()]
        case "docker":
            return [
                "Start Docker or Podman, and give this user access to it.",
                "Name an image with python3 (3.11 or newer), bash and git: --sandbox.docker_image "
                "(one that the engine has, or with --sandbox.docker_pull missing).",
            ]
    return []


def _user_namespaces() -> list[str]:
    found = []
    if _number(_APPARMOR) == 1:
        python = os.path.realpath(sys.executable)
        found.append(
            "AppArmor keeps ordinary users from making user namespaces (Ubuntu since 23.10). Allow "
            f"it for this Python: echo 'abi <abi/4.0>, profile envserver {python} "
            "flags=(unconfined) { userns, }' | sudo tee /etc/apparmor.d/envserver && "
            "sudo apparmor_parser -r /etc/apparmor.d/envserver"
        )
        found.append("Or for all: sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0")
    if _number(_CLONE) == 0:
        found.append("User namespaces are off: sudo sysctl -w kernel.unprivileged_userns_clone=1")
    if _number(_MOST) == 0:
        found.append("User namespaces are off: sudo sysctl -w user.max_user_namespaces=15000")
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        found.append(
            "This is a container: start it with --security-opt seccomp=unconfined "
            "--security-opt systempaths=unconfined, as an ordinary user (--user 1000) or with "
            "--cap-add SYS_ADMIN (Kubernetes: hostUsers: false and procMount: Unmasked)."
        )
    return found or ["Allow unprivileged user namespaces on this machine."]


def _landlock() -> list[str]:
    version = landlock.abi()
    if version == 0:
        return ["Turn Landlock on: Linux 6.12 or newer, and landlock in the kernel's lsm= list."]
    if version < LANDLOCK_ENOUGH:
        return [
            f"This kernel's Landlock is version {version}; version {LANDLOCK_ENOUGH} (Linux "
            "6.12) is needed. --sandbox.backend landlock uses it anyway, at your own risk."
        ]
    return []


def _reachable_python() -> list[str]:
    """Sandboxes of a root server have other users, who cannot pass a closed directory."""
    for path in {sys.base_prefix, sys.prefix}:
        for parent in Path(os.path.realpath(path)).parents:
            if os.geteuid() == 0 and not parent.stat().st_mode & 0o001:
                return [f"Install Python where every user can reach it: {parent} is closed."]
    return []


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


_MB = 2**20
_DISK_MB, _MEMORY_MB, _PROCESSES, _WALL_SECONDS = 8, 96, 8, 0.1
_LONGEST_SECONDS = 30.0


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One promise of a backend. `tried`: what was tried, each with its outcome."""

    name: str
    held: bool
    tried: list[str]


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of trying a backend on this machine.

    Args:
        checks: empty if no sandbox could be made.
        failure: why it does not work; "" if it works.
        remedies: what a person can do about it.
        weaknesses: what this backend does not prevent even if it works.
    """

    backend: str
    works: bool
    checks: list[Check] = []
    failure: str = ""
    remedies: list[str] = []
    weaknesses: list[str] = []


Outcome = tuple[bool, list[str]]
"""Whether the promise was kept, and what was tried."""

WEAKNESSES = {
    "landlock": [
        "what the server leaves behind when it is killed with SIGKILL",
        "the names and sizes of this machine's files",
        "its own /tmp: programs must use TMPDIR",
        "memory, disk and processes exactly (they are sampled)",
    ],
    "unsafe-local": ["anything: programs can do all that the server's user can do"],
}


def unavailable(backend: str, failure: str) -> ProbeReport:
    words = failure.strip() or "without a word"
    return ProbeReport(backend=backend, works=False, failure=words, remedies=remedies(backend))


async def examine(address: str, backend: str, private: Sequence[str] = ()) -> ProbeReport:
    limits = SandboxLimits(
        disk_mb=_DISK_MB, memory_mb=_MEMORY_MB, processes=_PROCESSES, wall_seconds=_LONGEST_SECONDS
    )
    wanted = _checks(private) if backend != "unsafe-local" else {}  # it promises nothing
    checks: list[Check] = []
    try:
        async with (
            SandboxClient(address) as client,
            asyncio.timeout(_LONGEST_SECONDS),
            client.open(SandboxSpec(limits=limits)) as sandbox,
        ):
            for name, check in wanted.items():
                held, tried = await check(sandbox)
                checks.append(Check(name=name, held=held, tried=tried))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the report is for
        return unavailable(backend, str(error) or type(error).__name__)
    broken = [check for check in checks if not check.held]
    failure = "; ".join(f"{check.name}: {', '.join(check.tried)}" for check in broken)
    return ProbeReport(
        backend=backend,
        works=not broken,
        checks=checks,
        failure=failure,
        remedies=remedies(backend) if broken else [],
        weaknesses=WEAKNESSES.get(backend, []),
    )


async def _runs_programs(sandbox: Sandbox) -> Outcome:
    shell = await sandbox.exec(["bash", "-c", "echo $((6*7))"])
    python = await sandbox.exec(["python3", "-c", _WHICH_PYTHON])
    warm = await sandbox.run_python(_WHICH_PYTHON)
    tried = [f"bash: {_words(shell)}", f"python3: {_words(python)}", f"warm: {_words(warm)}"]
    same = python.stdout == warm.stdout
    if not same:
        tried.append("python3 is not the Python of the server")
    return shell.stdout == b"42\n" and python.ok and warm.ok and same, tried


_WHICH_PYTHON = "import sys, json; print(sys.base_prefix, sys.version)"


async def _keeps_apart(sandbox: Sandbox) -> Outcome:
    """Network, processes and files of the server, attacked by name."""
    with _targets() as (facts, survived):
        result = await sandbox.run_python(_ESCAPES, argv=[json.dumps(facts)])
        survived_all = survived()
    if not result.ok:
        return False, [_words(result)]
    attempts = msgspec.json.decode(result.stdout, type=list[tuple[str, str]])
    tried = [f"{what}: {words or 'it worked'}" for what, words in attempts]
    return survived_all and all(words for _, words in attempts), tried


# Each attempt must fail; what follows a colon is how.
_ESCAPES = """
import ctypes, json, os, socket, sys
facts = json.loads(sys.argv[1])
def tcp():
    with socket.socket() as s:
        s.settimeout(2)
        s.connect(("127.0.0.1", facts["port"]))
def udp():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect(("192.0.2.1", 9))
        s.send(b"x")
def abstract():
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(facts["abstract"])
def named():
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(facts["named"])
def unshare():
    if ctypes.CDLL(None, use_errno=True).unshare(0x10000000):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
attempts = {
    "TCP to this machine": tcp,
    "UDP to another": udp,
    "an abstract socket": abstract,
    "a socket with a path": named,
    "killing a process": lambda: os.kill(facts["pid"], 9),
    "its environment": lambda: open(f"/proc/{facts['pid']}/environ", "rb").read(),
    "a file of the server": lambda: open(facts["file"]).read(),
    "changing /etc/passwd": lambda: os.open("/etc/passwd", os.O_WRONLY),
    "changing Python": lambda: os.open(os.__file__, os.O_WRONLY),
    "new namespaces": unshare,
}
def words(attempt):
    try:
        attempt()
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return ""
print(json.dumps([(what, words(attempt)) for what, attempt in attempts.items()]))
"""


@contextmanager
def _targets() -> Iterator[tuple[dict[str, Any], Callable[[], bool]]]:
    """Things of this process that a program must not reach; and whether they were left alone."""
    with (
        tempfile.TemporaryDirectory(
            prefix="envserver-probe-", dir=folder_for_sockets()
        ) as directory,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as named,
        subprocess.Popen(["sleep", "60"]) as victim,
        ExitStack() as stack,
    ):
        stack.callback(victim.kill)  # else whatever fails here waits for its end
        name = f"\0envserver-probe-{uuid.uuid4().hex}"
        path = Path(directory, "socket")
        for unix, place in ((abstract, name), (named, str(path))):
            unix.bind(place)
            unix.listen()
        file = Path(directory, "secret")
        file.write_text("a secret")
        # Open to every user: the backend must hold, not these bits.
        for reachable in (Path(directory), path, file):
            reachable.chmod(0o777)
        facts = {
            "port": tcp.getsockname()[1],
            "abstract": name,
            "named": str(path),
            "pid": victim.pid,
            "file": str(file),
        }
        yield facts, lambda: victim.poll() is None


async def _tells_no_secret(sandbox: Sandbox) -> Outcome:
    """Checks that programs and their ancestors lack the server's environment variables."""
    result = await sandbox.run_python(_ALL_VARIABLES)
    shown = result.stdout.decode(errors="replace")
    found = [name for name, value in os.environ.items() if _is_telling(value) and value in shown]
    return result.ok and not found, [f"of the server's variables: {', '.join(found) or 'none'}"]


_ALL_VARIABLES = """
import os
print(dict(os.environ))
try:
    everything = os.listdir("/proc")
except OSError:
    everything = ["self"]
for pid in everything:
    try:
        print(open(f"/proc/{pid}/environ", "rb").read())
    except OSError:
        continue
"""


def _is_telling(value: str) -> bool:
    """Long enough to be no coincidence; places are the same for everybody."""
    return len(value) >= 12 and "/" not in value


async def _hides_graders(private: Sequence[str], sandbox: Sandbox) -> Outcome:
    result, seen = await visible_graders(sandbox, private)
    tried = f"visible: {', '.join(seen) or 'none'}" if result.ok else _words(result)
    return result.ok and not seen, [tried]


async def _bounds_programs(sandbox: Sandbox) -> Outcome:
    endless = await sandbox.run_python(
        "import time; time.sleep(60)", limits=SandboxLimits(wall_seconds=_WALL_SECONDS)
    )
    hungry = await sandbox.run_python(f"len(b'x' * ({_MEMORY_MB * 4} << 20))")
    many = await sandbox.run_python(_FORKS, limits=SandboxLimits(wall_seconds=5.0))
    return endless.killed_by == "wall" and not hungry.ok and many.stdout != b"all", [
        f"sleeping: {_words(endless)}",
        f"{_MEMORY_MB * 4} MB: {_words(hungry)}",
        f"{_PROCESSES * 4} processes: {_words(many)}",
    ]


_FORKS = f"""
import os, time
for _ in range({_PROCESSES * 4}):
    if os.fork() == 0:
        time.sleep(2)
        os._exit(0)
time.sleep(1)
os.write(1, b"all")
"""


async def _bounds_workspace(sandbox: Sandbox) -> Outcome:
    wrote = await sandbox.exec(["bash", "-c", "echo kept > note && cat note"])
    flood = await sandbox.run_python(_FLOOD, limits=SandboxLimits(wall_seconds=5.0))
    tried = [f"a note: {_words(wrote)}", f"{_DISK_MB * 4} MB: {_words(flood)}"]
    return wrote.stdout == b"kept\n" and flood.stdout != b"all", tried


_FLOOD = f"""
import os, time
for number in range({_DISK_MB * 2}):
    with open(f"file-{{number}}", "wb") as file:
        file.write(bytes({2 * _MB}))
time.sleep(1)
os.write(1, b"all")
"""


def _checks(private: Sequence[str]) -> dict[str, Callable[[Sandbox], Awaitable[Outcome]]]:
    return {
        "programs run": _runs_programs,
        "network, processes and files of the server are out of reach": _keeps_apart,
        "no variable of the server is seen": _tells_no_secret,
        "graders and data of environments are hidden": partial(_hides_graders, private),
        "time, memory and processes are limited": _bounds_programs,
        # the last: it may leave a full disk
        "/work is writable, and is limited": _bounds_workspace,
    }


def _words(result: ExecResult) -> str:
    if result.killed_by:
        return f"killed by its limit of {result.killed_by}"
    lines = result.stderr.decode(errors="replace").strip().splitlines()
    if result.ok:
        return "ok"
    status = f"signal {result.signal}" if result.signal else f"status {result.exit}"
    return lines[-1][:200] if lines else status
