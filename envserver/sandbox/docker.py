"""The backend `docker`: one container per sandbox, through the Docker or Podman command line.

    supervisor --("fork")--> maker --(fork)--> relay
    client --(frames)--> relay --(stdin, stdout)--> docker run ... python3 --> in-sandbox server

A maker takes the place of a zygote. A relay is a process of this machine, one per sandbox: it reads
the spec, starts a container with its limits from the image that the spec names (default: the
engine's), sends this package's modules (the image only needs Python), then passes bytes on. The
container ends with its relay. Containers have no network, no capabilities, a read-only root and an
ordinary user.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

import msgspec

from . import linux
from .hidden import OUR_PACKAGES
from .namespaces import SOCKET_BUFFERS
from .wire import MAX_MESSAGE_BYTES, Frames, encode

ENGINES = ("docker", "podman")
_SECONDS = 15.0
_USER = 1000
_SERVER_MB = 64
"""Memory beyond that of the programs: for the in-sandbox server and its kernel memory."""
_SERVER_PROCESSES = 4
_CHUNK = 2**18
_IMAGE = re.compile(r"[A-Za-z0-9][\w.:/@-]{0,500}", re.ASCII)
_DIRECTORY = re.compile(r"(/[\w.-]+)+", re.ASCII)
"""Only such values go onto the engine's command line: one argument each, never an option."""

_VARIABLES = (
    *("PATH", "HOME", "XDG_RUNTIME_DIR", "TMPDIR"),
    *("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"),
    *("CONTAINER_HOST", "CONTAINER_CONNECTION", "CONTAINERS_CONF"),
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


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """A container engine that answers, and the image to start.

    Args:
        program: path of its command.
        variables: variables of the server that the command needs to find its engine.
    """

    program: str
    image: str
    variables: dict[str, str]


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of a maker, passed as JSON; see `zygote.Boot`."""

    control_fd: int
    supervisor_pid: int
    engine: Engine
    preload: list[str]


def main(boot_json: str) -> None:
    """Runs a maker: forks a relay on request, until the supervisor ends."""
    boot = msgspec.json.decode(boot_json, type=Boot)
    control = socket.socket(fileno=boot.control_fd)
    linux.die_with(boot.supervisor_pid, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # relays are not waited for
    control.send(json.dumps(["up"]).encode())
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 1)
        if not data:
            return
        request_id, _ = json.loads(data)
        channel = socket.socket(fileno=descriptors[0])
        maker_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            control.close()
            serve(channel, boot.engine, boot.preload, maker_pid)
        channel.close()
        pidfd = os.pidfd_open(pid)
        message = json.dumps(["forked", request_id, ""]).encode()
        socket.send_fds(control, [message], [pidfd])
        os.close(pidfd)


def find_engine(image: str, environ: Mapping[str, str] = os.environ) -> Engine:
    """Returns the first engine that answers and has the image.

    Raises:
        OSError: there is none; the message says why each failed.
    """
    variables = {name: environ[name] for name in _VARIABLES if name in environ}
    failed = []
    for name in ENGINES:
        program = shutil.which(name, path=environ.get("PATH"))
        if program is None:
            failed.append(f"{name} is not installed")
            continue
        failure = _asked(program, variables, "version")
        if not failure and not image:
            failure = "no image is named (--sandbox.docker_image)"
        elif not failure:
            failure = _asked(program, variables, "image", "inspect", image)
        if not failure:
            return Engine(program=program, image=image, variables=variables)
        failed.append(f"{name}: {failure}")
    raise OSError("; ".join(failed))


def _asked(program: str, variables: Mapping[str, str], *words: str) -> str:
    """Runs the engine's command; returns why it failed, or "" on success."""
    try:
        done = subprocess.run(
            [program, *words],
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else f"status {done.returncode}"


def command(engine: Engine, name: str, spec: Mapping[str, Any], words: list[str]) -> list[str]:
    """Returns the command line that starts a container for one sandbox.

    Args:
        name: of the container.
        spec: see SandboxSpec, by name; already checked by `usable`.
        words: arguments of its python3.
    """
    limits = spec["limits"]
    disk, inodes = int(limits["disk_mb"]), int(limits["inodes"])
    memory = int(limits["memory_mb"]) + 3 * disk + _SERVER_MB  # files in memory count as well
    mount = f"rw,exec,nosuid,nodev,size={disk}m,mode=1777"
    podman = Path(engine.program).name == "podman"
    if not podman:  # it refuses the option; files are sampled besides
        mount += f",nr_inodes={inodes + 4}"
    processes = int(limits["processes"]) + _SERVER_PROCESSES
    hidden = (f"{place}:ro,nosuid,nodev,size=4k,mode=0755" for place in spec["image_hides"])
    return [
        *(engine.program, "run", "--rm", "--interactive", "--name", name, "--init=false"),
        *("--sysctl", f"net.ipv4.tcp_rmem={SOCKET_BUFFERS}"),
        *("--sysctl", f"net.ipv4.tcp_wmem={SOCKET_BUFFERS}"),
        *("--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *("--user", f"{_USER}:{_USER}", "--read-only", "--hostname", "sandbox"),
        *(["--read-only-tmpfs=false"] if podman else []),  # no writable /run and /var/tmp
        *("--memory", f"{memory}m", "--memory-swap", f"{memory}m"),
        *("--pids-limit", str(processes), "--ulimit", "core=0"),
        # Docker makes a working folder anew, as root's: the supervisor goes to /work by itself.
        *("--tmpfs", f"/work:{mount}", "--tmpfs", f"/tmp:{mount}", "--tmpfs", f"/dev/shm:{mount}"),
        *("--workdir", "/"),
        *(word for settings in hidden for word in ("--tmpfs", settings)),
        *("--log-driver", "none", "--pull", "never", "--label", "envserver=sandbox"),
        *("--entrypoint", "python3", spec["image"] or engine.image, *words),
    ]


def usable(engine: Engine, spec: Mapping[str, Any]) -> str:
    """Returns why the image that `spec` names cannot be used, or "" if it can."""
    image = spec["image"]
    if image and not _IMAGE.fullmatch(image):
        return f"{image[:80]!r} is not an image name"
    for place in spec["image_hides"]:
        if not _DIRECTORY.fullmatch(place) or ".." in place:
            return f"{place[:80]!r} is not a directory of an image"
    if not image or image == engine.image:
        return ""
    return _asked(engine.program, engine.variables, "image", "inspect", image)


def serve(channel: socket.socket, engine: Engine, preload: list[str], maker_pid: int) -> NoReturn:
    """Runs a relay; ends the process.

    Failures are written to standard error; the client sees that its sandbox is lost.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    status = 1
    try:
        linux.die_with(maker_pid, signal.SIGTERM)
        _relay(channel, engine, preload)
        status = 0
    except SystemExit:
        status = 0
    except Exception as error:  # noqa: BLE001 - the last frame: whatever it is, say it and end
        sys.stderr.write(f"a container's relay: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
    finally:
        os._exit(status)


def _relay(channel: socket.socket, engine: Engine, preload: list[str]) -> None:
    first, spec = _hear_spec(channel)
    reason = usable(engine, spec)
    if reason:
        channel.sendall(encode("error", "unavailable", reason))
        return
    name = f"envserver-{uuid.uuid4().hex}"
    sent = bundle(preload)
    words = ["-I", "-c", _BOOT, str(len(sent)), json.dumps(preload)]
    parent = os.getpid()
    container = subprocess.Popen(
        command(engine, name, spec, words),
        env=engine.variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: linux.die_with(parent, signal.SIGKILL),
    )
    assert container.stdin is not None
    assert container.stdout is not None
    try:
        with contextlib.suppress(ConnectionError):  # it ended; its last output is on our stderr
            container.stdin.write(sent + first)
            container.stdin.flush()
            _pass_on(channel, container.stdin, container.stdout)
    finally:
        # The end of input ends the in-sandbox server; this also ends one that does not react.
        _asked(engine.program, engine.variables, "kill", name)
        container.kill()
        container.wait()


def _hear_spec(channel: socket.socket) -> tuple[bytes, dict[str, Any]]:
    """Returns the bytes that the client sent up to its set-up request, and its spec, by name."""
    frames, heard = Frames(), bytearray()
    while True:
        data = channel.recv(_CHUNK)
        if not data:
            raise SystemExit  # closed before it was set up
        heard += data
        for frame in frames.feed(data):
            return bytes(heard), frame[1]


def _pass_on(channel: socket.socket, to_inside: IO[bytes], from_inside: IO[bytes]) -> None:
    """Copies bytes both ways until either end is closed.

    Blocking writes are safe: both ends read what they are sent.
    """
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(from_inside, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == channel.fileno():
                data = channel.recv(_CHUNK)
                to_inside.write(data)
                to_inside.flush()
            else:
                data = os.read(descriptor, _CHUNK)
                channel.sendall(data)
            if not data:
                return


def bundle(preload: list[str]) -> bytes:
    """Returns this package's modules and those of `preload` that images lack, as JSON by name."""
    sources = dict.fromkeys(_EMPTY_PACKAGES, "")
    for path in Path(__file__).parent.glob("[!_]*.py"):
        sources[f"envserver.sandbox.{path.stem}"] = path.read_text()
    sources["envserver_records.errors"] = _ERRORS
    for name in preload:
        sources.update(_sources(name))
    return json.dumps(sources).encode()


def _sources(name: str) -> dict[str, str]:
    """Returns a module with its parents and submodules; nothing if the image must have it."""
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
    """Whether a module is sent. Libraries, large and perhaps compiled, belong in the image."""
    top = name.partition(".")[0]
    if origin.suffix != ".py" or top in sys.stdlib_module_names:
        return False
    installed = any(part in ("site-packages", "dist-packages") for part in origin.parts)
    return top in OUR_PACKAGES or not installed
