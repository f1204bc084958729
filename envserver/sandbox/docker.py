"""The backend `docker`: the Docker or Podman command, and what containers are started with.

    supervisor --("fork")--> maker --(fork)--> relay
    client --(frames)--> relay --(stdin, stdout)--> docker run ... python3 --> in-sandbox server

Containers have no network, no capabilities, a read-only root and an ordinary user; their image only
needs Python, since this package's modules are sent.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from .namespaces import SOCKET_BUFFERS
from .system import OUR_PACKAGES

ENGINES = ("docker", "podman")
_SECONDS = 30.0
PULL_SECONDS = 3600.0
LABEL = "envserver=sandbox"
"""Every container of a sandbox has it, of whatever server."""
_USER = 1000
_SERVER_MB = 64
"""Memory beyond that of the programs: for the in-sandbox server and its kernel memory."""
_SERVER_PROCESSES = 4
_IMAGE = re.compile(r"[A-Za-z0-9][\w.:/@-]{0,500}", re.ASCII)
_DIRECTORY = re.compile(r"(/[\w.-]+)+", re.ASCII)
"""Only such values go onto the engine's command line: one argument each, never an option."""

_VARIABLES = (
    *("PATH", "HOME", "XDG_RUNTIME_DIR", "TMPDIR"),
    *("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"),
    *("CONTAINER_HOST", "CONTAINER_CONNECTION", "CONTAINERS_CONF"),
    *("CONTAINERS_STORAGE_CONF", "CONTAINERS_REGISTRIES_CONF", "REGISTRY_AUTH_FILE"),
)

_EMPTY_PACKAGES = ("envserver", "envserver.sandbox", "envserver_records")
_ERRORS = """class ConfigError(Exception):
    def __init__(self, message, hint=""):
        super().__init__(message)
"""

# Reads modules by name from standard input and imports them from there.
_BOOT = """
import importlib.abc, importlib.util, json, os, sys
size, preload, data = int(sys.argv[1]), json.loads(sys.argv[2]), b""
while len(data) < size:
    data += os.read(0, size - len(data)) or sys.exit("the host is gone")
sources = json.loads(data)
class Sent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name not in sources:
            return None
        package = any(other.startswith(name + ".") for other in sources)
        return importlib.util.spec_from_loader(name, self, is_package=package)
    def exec_module(self, module):
        exec(compile(sources[module.__name__], f"<{module.__name__}>", "exec"), module.__dict__)
sys.meta_path.insert(0, Sent())
from envserver.sandbox.container import main
for name in [name for name in sources if name.startswith("envserver_records")]:
    del sources[name], sys.modules[name]  # programs find no module of that name
main(preload)
"""


Pull = Literal["never", "missing"]


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """A container engine that answers, and how many containers are started there, and when.

    Args:
        image: of sandboxes whose spec names none.
        variables: variables of the server that the command needs to find its engine.
        prefix: of the containers' names.
        pull: whether missing images are fetched.
        warm: containers kept started in advance, for each image and limits in use.
        most_warm: of them in all.
        starts: containers being started at the same time, at most.
    """

    program: str
    image: str
    variables: dict[str, str]
    prefix: str = ""
    pull: Pull = "never"
    warm: int = 0
    most_warm: int = 0
    starts: int = 1
    starts_per_second: float = 1.0


class ContainerKey(msgspec.Struct, frozen=True):
    """What is decided when a container starts: sandboxes that agree in it can take each other's.

    Args:
        hides: directories of the image that are empty in it.
        preload: modules that its server imports before it is ready.
    """

    image: str
    hides: tuple[str, ...]
    preload: tuple[str, ...]
    memory_mb: int
    disk_mb: int
    inodes: int
    processes: int


def key_of(engine: Engine, spec: Mapping[str, Any]) -> ContainerKey:
    image, limits = spec["image"], spec["limits"]
    if image and not _IMAGE.fullmatch(image):
        raise ValueError(f"{image[:80]!r} is not an image name")
    for place in spec["image_hides"]:
        if not _DIRECTORY.fullmatch(place) or ".." in place:
            raise ValueError(f"{place[:80]!r} is not a directory of an image")
    numbers = [int(limits[name]) for name in ("memory_mb", "disk_mb", "inodes", "processes")]
    return ContainerKey(
        image or engine.image, tuple(spec["image_hides"]), tuple(spec["preload"]), *numbers
    )


def find_engine(image: str, pull: Pull = "never") -> Engine:
    """The first engine that answers and has the image."""
    variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    failed = []
    for name in ENGINES:
        program = shutil.which(name)
        if program is None:
            failed.append(f"{name} is not installed")
            continue
        failure = failure_of(program, variables, "version")
        if not failure and not image:
            failure = "no image is named (--sandbox.docker_image)"
        elif not failure:
            failure = failure_of(program, variables, "image", "inspect", image)
            if failure and pull == "missing":
                words = ("pull", "--quiet", image)
                failure = failure_of(program, variables, *words, seconds=PULL_SECONDS)
        if not failure:
            return Engine(program=program, image=image, variables=variables)
        failed.append(f"{name}: {failure}")
    raise OSError("; ".join(failed))


def failure_of(
    program: str, variables: Mapping[str, str], *words: str, seconds: float = _SECONDS
) -> str:
    """Runs the engine's command; returns why it failed, or ""."""
    try:
        _output(program, variables, *words, seconds=seconds)
    except subprocess.CalledProcessError as error:
        return last_line(error.stderr) or f"status {error.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ""


def _output(program: str, variables: Mapping[str, str], *words: str, seconds: float) -> bytes:
    return subprocess.run(
        [program, *words],
        env=dict(variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=seconds,
        check=True,
    ).stdout


def last_line(output: bytes) -> str:
    """What a failed command output last is why; its advice is left out."""
    lines = output.decode(errors="replace").strip().splitlines()
    reasons = [line for line in lines if line.strip() and not line.startswith("See '")]
    return reasons[-1].strip()[:300] if reasons else ""


def command(engine: Engine, name: str, key: ContainerKey, sent: int) -> list[str]:
    """`sent`: bytes that the container's python3 reads first, see `bundle`."""
    memory = key.memory_mb + key.disk_mb + _SERVER_MB  # files in memory count as well
    mount = f"rw,exec,nosuid,nodev,size={key.disk_mb}m,mode=1777"
    shared = f"rw,exec,nosuid,nodev,size={max(1, key.disk_mb // 2)}m,mode=1777"
    podman = Path(engine.program).name == "podman"
    if not podman:  # it refuses the option; files are sampled besides
        mount, shared = (f"{settings},nr_inodes={key.inodes}" for settings in (mount, shared))
    processes = key.processes + _SERVER_PROCESSES
    hidden = (f"{place}:ro,nosuid,nodev,size=4k,mode=0755" for place in key.hides)
    return [
        *("run", "--rm", "--interactive", "--name", name, "--init=false"),
        *("--sysctl", f"net.ipv4.tcp_rmem={SOCKET_BUFFERS}"),
        *("--sysctl", f"net.ipv4.tcp_wmem={SOCKET_BUFFERS}"),
        *("--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *("--user", f"{_USER}:{_USER}", "--read-only", "--hostname", "sandbox"),
        *(["--read-only-tmpfs=false"] if podman else []),  # no writable /run and /var/tmp
        *("--memory", f"{memory}m", "--memory-swap", f"{memory}m"),
        *("--pids-limit", str(processes), "--ulimit", "core=0"),
        *(_podman_limits() if podman else []),
        # Docker makes a working folder anew, as root's: the supervisor goes to /work by itself.
        *("--tmpfs", f"/work:{mount}", "--tmpfs", f"/tmp:{mount}", "--tmpfs", f"/dev/shm:{shared}"),
        *("--workdir", "/"),
        *(word for settings in hidden for word in ("--tmpfs", settings)),
        *("--log-driver", "none", "--pull", "never", "--label", LABEL),
        *("--entrypoint", "python3", key.image, "-I", "-c", _BOOT),
        *(str(sent), json.dumps(key.preload)),
    ]


def _podman_limits() -> list[str]:
    """Podman asks for more open files and processes than a machine may allow it to."""
    words = []
    for name, kind, most in (
        ("nofile", resource.RLIMIT_NOFILE, 16_384),
        ("nproc", resource.RLIMIT_NPROC, 30_000),
    ):
        hard = resource.getrlimit(kind)[1]
        number = most if hard == resource.RLIM_INFINITY else min(hard, most)
        words += ["--ulimit", f"{name}={number}:{number}"]
    return words


@functools.lru_cache(16)
def bundle(preload: tuple[str, ...]) -> bytes:
    """This package's modules and those of `preload` that images lack, as JSON by name."""
    sources = dict.fromkeys(_EMPTY_PACKAGES, "")
    for path in Path(__file__).parent.glob("[!_]*.py"):
        sources[f"envserver.sandbox.{path.stem}"] = path.read_text()
    sources["envserver_records.errors"] = _ERRORS
    for name in preload:
        sources.update(_sources(name))
    return json.dumps(sources).encode()


def _sources(name: str) -> dict[str, str]:
    """A module with its parents and submodules; nothing if the image must have it."""
    found = {}
    for parent in (name.rsplit(".", count)[0] for count in range(name.count(".") + 1)):
        spec = importlib.util.find_spec(parent)
        if spec is None or spec.origin is None or not _is_sent(parent, Path(spec.origin)):
            return {}
        found[parent] = Path(spec.origin).read_text()
        for folder in (spec.submodule_search_locations or []) if parent == name else []:
            for path in Path(folder).rglob("*.py"):
                parts = path.relative_to(folder).with_suffix("").parts
                found[".".join([name, *parts]).removesuffix(".__init__")] = path.read_text()
    return found


def _is_sent(name: str, origin: Path) -> bool:
    """Libraries, large and perhaps compiled, belong in the image."""
    top = name.partition(".")[0]
    if origin.suffix != ".py" or top in sys.stdlib_module_names:
        return False
    installed = any(part in ("site-packages", "dist-packages") for part in origin.parts)
    return top in OUR_PACKAGES or not installed


# A container ends when its server does, since its input ends. One stays if the engine's command was
# killed before it asked the engine to start it or to remove it. A name identifies the server: the
# boot of its machine, its pid namespace, process id and start time. So only a server that certainly
# runs no more is cleaned up after: one of this boot and this namespace, whose process is gone.

_CLEANUP_SECONDS = 60.0
_START_TIME = 19
"""Its field in /proc/PID/stat, counted after the name."""


def new_prefix() -> str:
    """The beginning of the names of containers for one service of this process."""
    started = _start_time(os.getpid()) or 0
    return f"{_here()}-{os.getpid()}-{started}-{uuid.uuid4().hex[:8]}"


def remove_leftovers(engine: Engine) -> list[str]:
    """Removes and names the containers of servers that are gone, or those with its prefix."""
    names = [name for name in _names(engine) if _is_left(name, engine.prefix)]
    if names:
        words = ("rm", "--force", "--volumes", *names)
        failure_of(engine.program, engine.variables, *words, seconds=_CLEANUP_SECONDS)
    return names


def _is_left(name: str, prefix: str) -> bool:
    if prefix:
        return name.startswith(f"{prefix}-")
    parts = name.split("-")
    if not name.startswith(f"{_here()}-") or len(parts) != 7:
        return False
    pid, started = parts[3], parts[4]
    return pid.isdigit() and started.isdigit() and _is_gone(int(pid), int(started))


def _is_gone(pid: int, started: int) -> bool:
    known = _start_time(pid)
    if known is not None:
        return known != started
    # A /proc with `hidepid` has no processes of others: their signals are refused.
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False
    except (OSError, OverflowError):
        pass
    return True


def _names(engine: Engine) -> list[str]:
    words = ("ps", "--all", "--filter", f"label={LABEL}", "--format", "{{.Names}}")
    try:
        out = _output(engine.program, engine.variables, *words, seconds=_CLEANUP_SECONDS)
    except subprocess.CalledProcessError as error:
        out = error.stdout or b""  # what it could list
    except (OSError, subprocess.SubprocessError):
        return []
    return out.decode().split()


def _here() -> str:
    """The beginning of the names of this machine's servers: its boot and this pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")[:12]
    return f"envserver-{boot}-{Path('/proc/self/ns/pid').stat().st_ino}"


def _start_time(pid: int) -> int | None:
    """The start time of a process, in ticks since the boot; None: there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[_START_TIME])
