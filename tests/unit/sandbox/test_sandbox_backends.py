"""Each backend layer enforces its limits, and missing layers are handled.

When run by root, every test runs once more as an ordinary user, as most servers do.
"""

import ctypes
import errno
import functools
import mmap
import operator
import os
import platform
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from envserver_records.errors import ConfigError
from structlog.testing import capture_logs
from support.cases import cases_of
from support.forked import failures, forked, words
from support.sandboxes import sandboxes
from support.waiting import PATIENCE

from envserver import SandboxConfig, SandboxLimits, SandboxSpec, main
from envserver.sandbox import bubblewrap, landlock, seccomp, service, system
from envserver.sandbox.probe import ProbeReport, examine, unavailable
from envserver.sandbox.service import SandboxService, probe

CASES = cases_of(__file__)

PROJECT = Path(__file__).parents[3]
OURS = system.OUR_PACKAGES
X86 = platform.machine() == "x86_64"
LIBC = ctypes.CDLL(None, use_errno=True)
TABLE = cases_of(__file__, "seccomp_calls.toml")

is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def call(name: str, *arguments: Any) -> None:
    if getattr(LIBC, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def ran(*command: object) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)


def made(family: int, kind: int = 1) -> Callable[[], None]:
    """Makes a socket."""
    return functools.partial(call, "socket", family, kind, 0)


def test_the_filter_refuses_what_no_program_needs() -> None:
    def attempts() -> dict[str, str]:
        known = {
            "PARENT": os.getppid(),
            "FILE": os.open(__file__, os.O_RDONLY),
            "NAMESPACE": os.open("/proc/self/ns/user", os.O_RDONLY),
            "PIPE": os.pipe()[0],
            "PATH": __file__.encode(),
        }

        def argument(told: Any) -> Any:
            if isinstance(told, list):  # the number of a call on x86-64, and on aarch64
                return told[not X86]
            return known.get(told, told.encode()) if isinstance(told, str) else told

        seccomp.install(seccomp.program(inet=True))
        return failures(
            {
                name: functools.partial(call, function, *map(argument, told))
                for name, (function, *told) in TABLE["tried"].items()
            }
        )

    said = forked(attempts)
    refusals = [errno.EPERM, errno.ENOSYS, errno.EAFNOSUPPORT, errno.EOPNOTSUPP]
    assert len(said) == 33
    assert {
        name: text
        for name, text in said.items()
        if not any(f"[Errno {number}]" in text for number in refusals)
    } == {}


def test_without_a_network_there_is_no_socket_that_could_reach_a_server() -> None:
    def attempts() -> list[str]:
        seccomp.install(seccomp.program(inet=False))
        datagrams = lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # noqa: E731
        return [words(made(1)), words(made(2)), words(datagrams), words(socket.socketpair)]

    *refused, pair = forked(attempts)
    assert all(refused), refused
    assert pair == ""


def test_on_the_hosts_network_only_tcp_that_landlock_sees_goes_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()

        def fast_open() -> None:
            with socket.socket() as client:
                client.sendto(b"x", 0x20000000, address)

        def attempts() -> list[str]:
            seccomp.install(seccomp.program(inet=True, host=True))
            refused = (made(1), made(2, 2), fast_open)
            connecting = lambda: socket.create_connection(address).close()  # noqa: E731
            return [words(connecting), *map(words, refused)]

        connected, *refused = forked(attempts)
    assert connected == ""
    assert all(refused), refused


def test_files_of_the_server_keep_their_modes_and_times(tmp_path: Path) -> None:
    """Where no mount protects them; and copying goes on working."""
    mine = tmp_path / "mine"
    mine.write_text("x")
    before = mode_owner_and_time(mine)

    def attempts() -> list[str]:
        seccomp.install(seccomp.program(inet=False))
        descriptor = os.open(mine, os.O_RDONLY)
        changes = (
            lambda: mine.chmod(0),
            lambda: os.fchmod(descriptor, 0),
            lambda: os.utime(mine, (0, 0)),
            lambda: os.chown(mine, -1, os.getgid()),
            lambda: shutil.copy2(mine, tmp_path / "copy"),
        )
        return list(map(words, changes))

    assert forked(attempts) == [""] * 5
    assert (tmp_path / "copy").read_text() == "x"
    assert mode_owner_and_time(mine) == before


def mode_owner_and_time(path: Path) -> tuple[int, ...]:
    """All that a change would show. Reading, too, moves the time of access."""
    status = path.stat()
    return status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns


@pytest.mark.skipif(not X86, reason="only x86_64 has a second table of calls")
def test_calls_by_another_table_kill() -> None:
    def attempt() -> int:
        seccomp.install(seccomp.program(inet=True))
        return LIBC.syscall(0x40000000 | 39)

    assert forked(attempt) == -signal.SIGSYS


# The filter in an interpreter, to cover architectures other than this one.

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
VERDICTS = {"allow": 0x7FFF0000, "kill": 0x80000000, "nothing": 0x50000}
VERDICTS |= {name: 0x50000 | getattr(errno, name) for name in ("EPERM", "ENOSYS", "EAFNOSUPPORT")}
JUMPS: dict[int, Callable[[int, int], object]] = {
    0x15: operator.eq,
    0x25: operator.gt,
    0x35: operator.ge,
    0x45: operator.and_,
}


def verdict(program: bytes, audit: int, number: int, *arguments: int) -> int:
    """What the kernel would do about a call: classic BPF, as far as filters use it."""
    data = struct.pack("=IIQ6Q", number, audit, 0, *arguments, *[0] * (6 - len(arguments)))
    code = list(struct.iter_unpack("HBBI", program))
    place = value = 0
    while True:
        operation, if_so, if_not, operand = code[place]
        place += 1
        if operation in JUMPS:
            place += if_so if JUMPS[operation](value, operand) else if_not
        elif operation == 0x20:
            (value,) = struct.unpack_from("=I", data, operand)
        elif operation == 0x54:
            value &= operand
        elif operation == 0x05:
            place += operand
        else:
            assert operation == 0x06, f"{operation:#x} is unknown"
            return int(operand)


@pytest.mark.parametrize("machine", AUDIT)
@pytest.mark.parametrize("inet", [True, False], ids=["own network", "no network"])
def test_calls_get_verdicts(machine: str, inet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    program = seccomp.program.__wrapped__(inet=inet)
    assert len(program) // 8 < 4096  # the kernel takes no longer one
    audit, other = AUDIT[machine], AUDIT["aarch64" if machine == "x86_64" else "x86_64"]
    for name, (numbers, arguments, with_it, *without) in TABLE["verdicts"].items():
        number = numbers[machine == "aarch64"]
        expected = with_it if inet else [with_it, *without][-1]
        assert verdict(program, audit, number, *arguments) == VERDICTS[expected], name
    assert verdict(program, other, 0) == VERDICTS["kill"]
    assert verdict(program, audit, 0x40000000) == VERDICTS["kill"]


def test_a_machine_without_a_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(ConfigError, match="riscv64"):
        seccomp.program.__wrapped__(inet=True)


ORDINARY_WORK = CASES["ordinary_work"]


def test_ordinary_programs_work_under_the_filter() -> None:
    enclose = (
        f"from envserver.sandbox import seccomp; seccomp.install({seccomp.program(inet=True)})"
    )
    result = ran(sys.executable, "-c", f"{enclose}\n{ORDINARY_WORK}")
    assert result.stdout.endswith("done\n"), result.stderr


needs_landlock = pytest.mark.skipif(landlock.abi() < 6, reason="no Landlock 6 in this kernel")


@needs_landlock
def test_landlock_leaves_nothing_but_what_was_named(tmp_path: Path) -> None:
    work, secret = tmp_path / "work", tmp_path / "secret"
    work.mkdir()
    secret.write_text("x")
    with (
        socket.create_server(("127.0.0.1", 0)) as named,
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        abstract.bind(f"\0landlock-{os.getpid()}")
        abstract.listen()
        ports = [each.getsockname()[1] for each in (named, other)]

        def attempts() -> dict[str, str]:
            landlock.restrict(system.visible_paths(), [str(work)], connect_ports=ports[:1])
            attempted = {
                "read": secret.read_text,
                "list": lambda: list(PROJECT.iterdir()),
                "write": lambda: (tmp_path / "new").write_text("x"),
                "system": lambda: os.open(os.__file__, os.O_WRONLY),
                "signal": lambda: os.kill(os.getppid(), 0),
                "bind": lambda: socket.create_server(("127.0.0.1", 0)),
                "other port": lambda: socket.create_connection(("127.0.0.1", ports[1])),
                "abstract": lambda: connect_unix(f"\0landlock-{os.getppid()}"),
                "ok: work": lambda: (work / "a").write_text("x"),
                "ok: rename": lambda: (work / "a").rename(work / "b"),
                "ok: import": lambda: __import__("wave"),
                "ok: null": lambda: Path("/dev/null").write_text("x"),
                "ok: named port": lambda: socket.create_connection(("127.0.0.1", ports[0])),
                "ok: memory": lambda: mmap.mmap(-1, 4096),
            }
            return failures(attempted)

        found = forked(attempts)
    assert {
        name: said for name, said in found.items() if (said == "") != name.startswith("ok")
    } == {}


def connect_unix(address: str) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)


def test_no_file_of_the_project_is_visible() -> None:
    ours = [Path(path) for path in system.visible_paths() if Path(path).is_relative_to(PROJECT)]
    prefix = Path(sys.prefix)
    assert all(path.is_relative_to(prefix) for path in ours)
    names = [path.name for path in ours if path.parent.name == "site-packages"]
    assert "numpy" in names or not ours
    assert not [name for name in names if "envserver" in name]
    homes = [Path("/root"), Path("/home"), Path("/var"), Path("/tmp"), Path.home()]
    assert not set(homes) & {Path(path) for path in system.visible_paths()}


def test_packages_that_bring_environments_are_hidden_wherever_they_are(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    assert ran(sys.executable, "-m", "venv", "--without-pip", venv).returncode == 0
    site = next(venv.glob("lib/python*/site-packages"))
    for name, points in (("graders", "[envserver.environments]\nx = graders:X\n"), ("fine", "")):
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(points)
        (info / "RECORD").write_text(f"{name}/__init__.py,,\n{name}-1.0.dist-info/METADATA,,\n")
        (site / name).mkdir()
        (site / name / "__init__.py").touch()
    (site / "project.pth").write_text(f"{PROJECT}\n")
    (site / "linked").symlink_to(PROJECT / "tools" / "envserver_tools")
    code = "from envserver.sandbox import system; print(*system.visible_paths(), sep='\\n')"
    shown = ran(venv / "bin/python", "-c", code)
    assert shown.returncode == 0, shown.stderr
    seen = {Path(path).name for path in shown.stdout.split() if path.startswith(str(site))}
    assert seen == {"fine", "fine-1.0.dist-info"}


async def test_programs_see_python_but_not_what_is_ours() -> None:
    code = f"""
import importlib.util, os, sys
for name in {(*OURS, "numpy")!r}:
    print(name, importlib.util.find_spec(name) is not None)
found = [p for e in sys.path if os.path.isdir(e) for p in os.listdir(e) if "envserver" in p]
print(found, os.listdir("/work"), os.listdir("/tmp"))
"""
    async with sandboxes("namespace") as client, client.open(SandboxSpec()) as sandbox:
        cold = await sandbox.exec(["python3", "-c", code.replace('"', "'")])
        pytest_there = await sandbox.exec(["pytest", "--version"])
    lines = cold.stdout.decode().splitlines()
    assert lines[: len(OURS)] == [f"{name} False" for name in OURS]
    assert lines[len(OURS) :] == ["numpy True", "[] [] []"], cold
    assert pytest_there.ok, pytest_there


@pytest.mark.parametrize("backend", service.ORDER)
async def test_a_wall_that_works_holds_all_its_checks(backend: str) -> None:
    report = await probe(backend, SandboxConfig(backend=backend))
    if backend == "bubblewrap" and bubblewrap.installed() is None:
        pytest.skip(report.failure)
    if backend == "landlock" and not report.works:
        pytest.skip(f"{report.failure} {report.remedies}")
    assert report.works, report
    assert len(report.checks) == 6
    assert all(check.tried for check in report.checks)


def test_sandboxes_work_within_the_limits_of_a_batch_system() -> None:
    limits = "ulimit -v 4000000 -n 100 -f 200000 -i 100 -l 64 -d 3000000 -u 4000"
    told = ran("bash", "-c", f"{limits} && exec {sys.executable} -m envserver doctor --json")
    (namespace,) = [
        one for one in orjson.loads(told.stdout)["backends"] if one["backend"] == "namespace"
    ]
    assert namespace["works"], namespace


async def test_a_wall_with_holes_is_seen_through() -> None:
    async with SandboxService(SandboxConfig(backend="unsafe-local")) as open_service:
        report = await examine(open_service.address, "namespace")
    assert not report.works
    for hole in (
        "TCP to this machine: it worked",
        "a file of the server: it worked",
        "graders and data of environments are hidden: visible: ",
    ):
        assert hole in report.failure


async def test_folders_too_deep_to_be_counted_are_too_many() -> None:
    limits = SandboxLimits(wall_seconds=60)
    deep = (
        "import os, time\nfor _ in range(600): os.mkdir('d' * 20); os.chdir('d' * 20)\n"
        "time.sleep(3600)"
    )
    async with sandboxes("unsafe-local") as boxes, boxes.open(SandboxSpec(limits=limits)) as box:
        assert (await box.run_python(deep)).killed_by == "inodes"


async def test_nobody_steps_down_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the better backends fail, Landlock is taken aloud; where all fail, none is."""

    async def holds(address: str, backend: str, private: object) -> ProbeReport:
        return ProbeReport(backend=backend, works=True)

    def fails(backend: str, *, by_name: bool) -> ProbeReport | None:
        return unavailable(backend, f"{backend} is broken") if backend in broken else None

    broken = {"bubblewrap", "namespace"}
    monkeypatch.setattr(service, "examine", holds)
    monkeypatch.setattr(service, "missing", fails)
    monkeypatch.setattr(service, "_held", {})
    with capture_logs() as logs:
        async with SandboxService(SandboxConfig()) as weaker:
            assert weaker.backend == "landlock"
    warning = next(line for line in logs if line["log_level"] == "warning")
    assert warning["failed"]["namespace"] == "namespace is broken"
    assert "SIGKILL" in warning["does_not_hold"]

    broken.add("landlock")
    with pytest.raises(ConfigError) as refusal:
        await SandboxService(SandboxConfig()).__aenter__()
    assert all(f"{backend} is broken" in refusal.value.message for backend in service.ORDER)
    assert "docker" in refusal.value.hint


def test_landlock_without_signals_is_only_taken_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "abi", lambda: 4)
    report = service.missing("landlock", by_name=False)
    assert report is not None
    assert "version 4" in report.failure
    assert service.missing("landlock", by_name=True) is None


def test_doctor_tells(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    works = {"namespace"}

    async def probed(backend: str, config: SandboxConfig) -> ProbeReport:
        if backend in works:
            return ProbeReport(backend=backend, works=True)
        return unavailable(backend, f"[{backend}] is broken")

    monkeypatch.setattr(service, "probe", probed)
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert "use the backend namespace" in told
    assert "[bubblewrap] is broken" in told
    assert sys.version.split()[0] in told

    assert main(["doctor", "--json"]) == 0
    found = orjson.loads(capsys.readouterr().out)
    assert found["backend"] == "namespace"
    assert {"Python", "git", "memory", "cgroups", "open files"} <= {
        f["name"] for f in found["machine"]
    }

    works.clear()
    assert main(["doctor"]) == 1
    assert "No sandbox backend works" in capsys.readouterr().out


@needs_landlock
@pytest.mark.skipif(os.geteuid() == 0, reason="root needs no user namespace for its outer backend")
def test_where_namespaces_are_forbidden_landlock_is_taken() -> None:
    forbid = (
        "import os, sys; from envserver.sandbox import namespaces; namespaces.own_users();"
        "open('/proc/sys/user/max_user_namespaces', 'w').write('0');"
        "os.execv(sys.executable, [sys.executable, '-m', 'envserver', 'doctor', '--json'])"
    )
    told = ran(sys.executable, "-c", forbid)
    found = orjson.loads(told.stdout)
    assert found["backend"] == "landlock"
    (namespace,) = [report for report in found["backends"] if report["backend"] == "namespace"]
    assert "unshare" in namespace["failure"]
    assert any("max_user_namespaces" in step for step in namespace["remedies"])
    assert "Traceback" not in told.stderr


@pytest.mark.thorough
@is_root
def test_all_of_this_holds_for_an_ordinary_user() -> None:
    from support.ordinary_user import run_as_ordinary_user

    words = ["python", "-m", "pytest", str(Path(__file__)), "-q", "-p", "no:cacheprovider"]
    result = run_as_ordinary_user(words)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "passed" in result.stdout
