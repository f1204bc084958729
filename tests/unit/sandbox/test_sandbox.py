"""What a sandbox promises: how programs run and end, its files, its limits, what it counts."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.cases import cases_of
from support.process_tree import alive_with, marked
from support.sandboxes import archive, sandboxes, sandboxes_elsewhere
from support.waiting import PATIENCE, settled, until

from envserver import (
    ExecResult,
    InputError,
    Sandbox,
    SandboxError,
    Sandboxes,
    SandboxLimits,
    SandboxSpec,
)

CASES = cases_of(__file__)

pytestmark = pytest.mark.asyncio(loop_scope="module")

MB = 1 << 20
HOUR = 3600.0  # a limit that no program reaches
NOISE = " ".join(map(str, range(30_000))).encode()


def damaged(data: bytes) -> bytes:
    """`data` with 40 other bytes in its middle."""
    middle = len(data) // 2
    return data[:middle] + bytes(byte ^ 0x5A for byte in data[middle:][:40]) + data[middle + 40 :]


def limited(**limits: float) -> SandboxSpec:
    return SandboxSpec(limits=SandboxLimits(**limits))  # type: ignore[arg-type]


PLAIN, PATIENT = SandboxSpec(), limited(wall_seconds=HOUR)


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["here", pytest.param("elsewhere", marks=pytest.mark.thorough)],
)
async def boxes(request: pytest.FixtureRequest) -> AsyncIterator[Sandboxes]:
    async with (sandboxes if request.param == "here" else sandboxes_elsewhere)() as those:
        yield those


@pytest_asyncio.fixture(loop_scope="module")
async def box(boxes: Sandboxes) -> AsyncIterator[Sandbox]:
    async with boxes.open(PATIENT) as one:
        yield one


def stay(
    box: Sandbox, mark: str, first: str = "true", then: str = "true"
) -> asyncio.Task[ExecResult]:
    """Runs `first`, then the program that `alive_with(mark)` finds, then `then`."""
    source = f"{first}; sleep $STAY; {then}"
    return asyncio.create_task(box.exec(["sh", "-c", source], env={"STAY": mark}))


async def cancelled(task: asyncio.Task[ExecResult]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# Programs.


async def test_a_program_gets_its_words_input_and_variables(box: Sandbox) -> None:
    source = 'read line; echo "$1|$line|$NAME|$PWD"; echo trouble >&2; exit 3'
    result = await box.exec(
        ["sh", "-c", source, "sh", "a b"], stdin=b"hello\n", env={"NAME": "é"}, cwd="/tmp"
    )
    assert result.stdout.decode() == "a b|hello|é|/tmp\n"
    assert result.stderr == b"trouble\n"
    assert (result.exit, result.signal, result.killed_by, result.ok) == (3, None, "", False)


async def test_python_code_runs_as_python_would_run_it(box: Sandbox) -> None:
    code = """
import sys
print(__name__, sys.argv, sys.stdin.read(), sys.flags.isolated)
raise ValueError("wrong")
"""
    result = await box.run_python(code, argv=["a", "b"], stdin=b"in")
    plain = await box.exec(["python3", "-I", "-c", code, "a", "b"], stdin=b"in")
    assert result.stdout == b"__main__ ['-c', 'a', 'b'] in 1\n"
    assert (result.exit, result.stdout, result.stderr) == (1, plain.stdout, plain.stderr)


async def test_exit_statuses_are_those_of_python_and_signals_are_told(box: Sandbox) -> None:
    for code, status in CASES["exits"].items():
        result = await box.run_python(code)
        assert (result.exit, result.signal, result.killed_by) == (status, None, ""), code
    for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGABRT):
        by_shell = await box.exec(["sh", "-c", f"kill -{number.value} $$"])
        by_python = await box.run_python(f"import os; os.kill(os.getpid(), {number.value})")
        for result in (by_shell, by_python):
            assert (result.exit, result.signal, result.killed_by) == (None, number, "")


async def test_what_cannot_be_started_exits_with_127(box: Sandbox) -> None:
    with pytest.raises(InputError):
        await box.exec([])
    await box.write("data", b"no program")
    for argv in (["no-such-program"], ["/work/data"], ["/work"], [""]):
        result = await box.exec(argv)
        assert (result.exit, result.killed_by) == (127, ""), argv
        assert result.stderr, argv
    assert (await box.exec(["true"], cwd="/no/such/place")).exit == 127
    assert (await box.run_python("1", cwd="/no/such/place")).exit == 127


async def test_only_what_was_given_is_in_the_environment(boxes: Sandboxes) -> None:
    async with boxes.open(SandboxSpec(env={"OF_SPEC": "1", "BOTH": "spec"})) as box:
        result = await box.exec(["env"], env={"BOTH": "exec", "OF_EXEC": "2"})
        names = dict(line.split("=", 1) for line in result.stdout.decode().splitlines())
        assert (names["OF_SPEC"], names["BOTH"], names["OF_EXEC"]) == ("1", "exec", "2")
        assert names["HOME"] == "/work"
        assert {"PATH", "LANG", "TMPDIR"} <= names.keys()
        assert not names.keys() & (os.environ.keys() - {*_OWN_VARIABLES})
        again = await box.run_python("import os; print(sorted(os.environ.items()))")
        assert b"'BOTH', 'spec'" in again.stdout and b"OF_EXEC" not in again.stdout


_OWN_VARIABLES = (
    *("PATH", "HOME", "LANG", "TMPDIR", "USER", "LOGNAME", "SHELL", "TERM", "PWD", "SHLVL", "_"),
    *("PAGER", "GIT_PAGER", "GIT_TERMINAL_PROMPT", "GIT_CONFIG_NOSYSTEM"),
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
)


async def test_programs_share_files_and_nothing_else_and_no_random_numbers(box: Sandbox) -> None:
    await box.run_python(
        "open('kept', 'w').write('1'); import os, json; os.environ['X'] = json.x = '1'"
    )
    result = await box.run_python(
        "import os, json; print(open('kept').read(), 'X' in os.environ, hasattr(json, 'x'))"
    )
    assert result.stdout == b"1 False False\n"
    code = "import random, uuid, os; print(random.random(), uuid.uuid4(), os.urandom(4))"
    assert len({result.stdout for result in [await box.run_python(code) for _ in range(3)]}) == 3


async def test_preloaded_modules_are_there_at_once_or_told(boxes: Sandboxes) -> None:
    with pytest.raises(SandboxError, match="no_such_module"):
        async with boxes.open(SandboxSpec(preload=("no_such_module",))):
            pass
    async with boxes.open(SandboxSpec(preload=("decimal", "fractions"))) as box:
        result = await box.run_python(
            "import sys; print('decimal' in sys.modules, 'sqlite3' in sys.modules)"
        )
        assert result.stdout == b"True False\n"


# Turns, cancellation, the end.


async def test_programs_of_one_sandbox_take_turns(box: Sandbox) -> None:
    code = "import os, time; os.mkdir('turn'); time.sleep(0.05); os.rmdir('turn')"
    results = await asyncio.gather(*[box.run_python(code) for _ in range(4)])
    assert [result.stderr for result in results] == [b""] * 4


async def test_sandboxes_run_side_by_side_and_apart(boxes: Sandboxes) -> None:
    mark, all_run = marked(), asyncio.Event()

    async def one(number: int) -> bytes:
        async with boxes.open(PATIENT) as box:
            await box.write("own", str(number).encode())
            staying = stay(box, mark, "ls -A /tmp /dev/shm; cat own > /tmp/own")
            await all_run.wait()
            await cancelled(staying)
            return (await box.exec(["sh", "-c", "cat own /tmp/own"])).stdout

    results = asyncio.gather(*[one(number) for number in range(8)])
    await until(lambda: len(alive_with(mark)) == 8)
    all_run.set()
    assert await results == [f"{number}{number}".encode() for number in range(8)]


async def test_a_cancelled_program_ends_and_the_sandbox_lives(box: Sandbox) -> None:
    mark = marked()
    running = stay(box, mark, "echo > began", "echo > late")
    await until(lambda: alive_with(mark))
    await cancelled(running)
    result = await box.exec(["sh", "-c", "ls /proc | grep -c '^[0-9]'; ls"])
    assert result.stdout.decode().split()[1:] == ["began"]
    assert (await box.total()).killed == {"cancelled": 1}


async def test_a_program_that_is_given_up_at_once_does_not_run_to_its_limit(box: Sandbox) -> None:
    """The request to cancel can arrive together with the program."""
    for turns in (1, 2, 3):
        running = asyncio.create_task(box.exec(["sleep", "3600"]))
        for _ in range(turns):
            await asyncio.sleep(0)
        await cancelled(running)
    assert "wall" not in (await box.total()).killed


async def test_a_request_that_waits_for_its_turn_can_be_cancelled(box: Sandbox) -> None:
    mark = marked()
    first = stay(box, mark, then="echo first")
    await until(lambda: alive_with(mark))
    second = asyncio.create_task(box.exec(["sh", "-c", "echo > second"]))
    await settled()
    await cancelled(second)
    for pid in alive_with(mark):
        os.kill(pid, signal.SIGTERM)
    assert (await first).stdout == b"first\n"
    with pytest.raises(InputError):
        await box.read("second")


async def test_the_end_of_a_sandbox_ends_its_program(boxes: Sandboxes) -> None:
    async with boxes.open(PATIENT) as box:
        mark = marked()
        running = stay(box, mark)
        await until(lambda: alive_with(mark))
        await box.close()
        with pytest.raises(SandboxError):
            await running
        await until(lambda: not alive_with(mark))
        await box.close()  # may be asked for twice
        asked = (box.exec(["true"]), box.run_python(""), box.read("x"), box.write("x", b""))
        for request in (*asked, box.total()):
            with pytest.raises(SandboxError):
                await request


async def test_more_sandboxes_than_there_is_room_for_wait() -> None:
    async with sandboxes(concurrent=2) as few:

        async def one(number: int) -> int:
            async with few.open(PLAIN) as box:
                return int((await box.run_python(f"print({number})")).stdout)

        assert await asyncio.gather(*[one(number) for number in range(12)]) == list(range(12))
        async with few.open(PLAIN), few.open(PLAIN):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3), few.open(PLAIN):
                    pass
        async with few.open(PLAIN), few.open(PLAIN) as box:
            assert (await box.exec(["true"])).ok


# Input and output.


async def test_input_over_its_limit_is_refused(boxes: Sandboxes) -> None:
    async with boxes.open(limited(input_kb=4)) as box:
        assert (await box.exec(["wc", "-c"], stdin=bytes(4096))).stdout.split() == [b"4096"]
        long = bytes(4097)
        for request in (box.exec(["cat"], stdin=long), box.run_python("", stdin=long)):
            with pytest.raises(InputError):
                await request
        assert (await box.exec(["true"])).ok


async def test_input_need_not_be_read(box: Sandbox) -> None:
    assert (await box.exec(["true"], stdin=bytes(900_000))).ok
    result = await box.exec(["sh", "-c", "cat; cat"])
    assert (result.stdout, result.exit) == (b"", 0)


async def test_long_output_is_cut_and_marked(boxes: Sandboxes) -> None:
    async with boxes.open(limited(output_kb=4)) as box:
        whole = await box.run_python("import sys; sys.stdout.write('x' * 4096)")
        assert (whole.stdout, whole.truncated) == (b"x" * 4096, False)
        cut = await box.run_python(
            "import sys; sys.stdout.write('x' * 20000); sys.stderr.write('short')"
        )
        assert (cut.stdout, cut.stderr, cut.truncated) == (b"x" * 4096, b"short", True)
        assert (cut.exit, cut.killed_by, cut.usage.output_bytes) == (0, "", 20005)


# Limits.

ONE_REASON_EACH = {
    "wall": "import time; time.sleep(3600)",
    "cpu": "import os; os.write(1, b'out'); os.write(2, b'err')\nwhile True: pass",
    "memory": """
import time
taken = [bytearray(b"x" * 2**20) for _ in range(100)]
time.sleep(3600)
""",
    "output": "import os\nwhile True: os.write(1, bytes(65536))",
}


@pytest.mark.parametrize("reason", ONE_REASON_EACH)
async def test_each_limit_ends_a_program_by_its_name(boxes: Sandboxes, reason: str) -> None:
    ample = limited(wall_seconds=HOUR, cpu_seconds=HOUR, memory_mb=64, output_kb=4)
    tight = SandboxLimits(
        wall_seconds=0.3 if reason == "wall" else HOUR, cpu_seconds=0.4 if reason == "cpu" else HOUR
    )
    async with boxes.open(ample) as box:
        result = await box.run_python(ONE_REASON_EACH[reason], limits=tight)
        assert result.killed_by == reason
        if reason == "cpu":  # what came before the end is kept
            assert (result.stdout, result.stderr) == (b"out", b"err")
        assert result.exit is None and not result.ok
        assert (await box.run_python("print(1)")).ok
        usage = await box.total()
        assert (usage.killed, usage.executions) == ({reason: 1}, 2)


async def test_what_is_full_stays_full_and_harms_nobody(boxes: Sandboxes) -> None:
    fill = CASES["fill"]
    async with boxes.open(limited(disk_mb=4, inodes=64)) as box:
        result = await box.run_python(fill)
        assert result.killed_by in ("", "disk", "inodes")
        look = "import os; print(os.path.getsize('big') <= 4 << 20, len(os.listdir()) <= 64)"
        assert (await box.run_python(look)).stdout == b"True True\n"
        with pytest.raises(InputError):
            await box.write("more", bytes(4 * MB))
        await box.exec(["sh", "-c", "rm -r /work/*"])
        await box.write("more", bytes(MB))


async def test_processes_are_bounded_together(boxes: Sandboxes) -> None:
    code = """
import os, time
for forked in range(40):
    try:
        if os.fork() == 0:
            time.sleep(3600); os._exit(0)
    except OSError:
        break
print(forked)
"""
    async with boxes.open(limited(processes=8)) as box:
        result = await box.run_python(code)
        assert result.killed_by == "processes" or int(result.stdout) <= 8
        assert result.usage.peak_processes <= 9
        assert (await box.run_python("print(1)")).ok


async def test_limits_of_one_program_only_tighten(boxes: Sandboxes) -> None:
    wide = SandboxLimits(wall_seconds=HOUR, output_kb=64)
    async with boxes.open(limited(wall_seconds=0.3)) as box:
        assert (await box.exec(["sleep", "3600"], limits=wide)).killed_by == "wall"
    async with boxes.open(limited(wall_seconds=HOUR, output_kb=4)) as box:
        result = await box.exec(["sh", "-c", "yes | head -c 8000"], limits=wide)
        assert (result.killed_by, len(result.stdout)) == ("", 4096)
        tight = await box.exec(["sleep", "3600"], limits=SandboxLimits(wall_seconds=0.1))
        assert tight.killed_by == "wall"


# Files.


async def test_files_are_read_and_written(box: Sandbox) -> None:
    data = bytes(range(256)) * 1000
    await box.write("new/folder/file.bin", data)
    assert await box.read("new/folder/file.bin") == data
    assert await box.read("/work/new/folder/file.bin", 10) == data[:10]
    await box.write("new/folder/file.bin", b"short")
    result = await box.exec(["cat", "new/folder/file.bin"])
    assert result.stdout == b"short"
    await box.write("/tmp/elsewhere", b"there")
    assert (await box.exec(["cat", "/tmp/elsewhere"])).stdout == b"there"


async def test_what_cannot_be_read_is_told(box: Sandbox) -> None:
    await box.exec(["sh", "-c", "mkfifo pipe; ln -s loop loop; ln -s /dev/full full; mkdir folder"])
    paths = ("absent", "pipe", "loop", "full", "folder", "", ".", "/dev/full", "a\0b", "x" * 5000)
    for path in paths:
        with pytest.raises(InputError):
            await asyncio.wait_for(box.read(path), PATIENCE)
        if path != "absent":
            with pytest.raises(InputError):
                await asyncio.wait_for(box.write(path, b"x"), PATIENCE)
    for path in ("/usr/file", "/etc/passwd", "/proc/self/comm", "folder/../pipe/x", "/file"):
        with pytest.raises(InputError):
            await box.write(path, b"x")


async def test_names_that_are_no_text_do_no_harm(box: Sandbox) -> None:
    await box.run_python(r"open(b'\xff\xfe', 'w').write('odd'); open('new\nline', 'w').write('x')")
    assert await box.read("new\nline") == b"x"
    with pytest.raises(InputError):
        await box.read(os.fsdecode(b"\xff\xfe"))
    with pytest.raises(InputError):
        await box.run_python("print('\ud800')")
    assert (await box.exec(["sh", "-c", "cat *"])).stdout == b"xodd"


async def test_deep_folders_do_not_hinder_the_end(boxes: Sandboxes) -> None:
    async with boxes.open(PLAIN) as box:
        code = "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')\nopen('end', 'w')"
        await box.run_python(code)
        with pytest.raises(InputError):
            await box.read("d/" * 3000 + "end")


async def test_it_starts_with_its_archive_and_files(boxes: Sandboxes) -> None:
    spec = SandboxSpec(
        archive=archive(repo__a=b"from the archive", repo__b=b"b"),
        files={"repo/a": b"from the files", "deep/er/c": b"c"},
    )
    async with boxes.open(spec) as box:
        result = await box.exec(["sh", "-c", "cat repo/a repo/b deep/er/c; ls -A"])
        assert result.stdout == b"from the filesbcdeep\nrepo\n"


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(SandboxSpec(archive=b"no archive"), id="no archive"),
        pytest.param(SandboxSpec(archive=archive(file=bytes(9999))[:60]), id="cut archive"),
        *(SandboxSpec(archive=damaged(archive(how, file=NOISE))) for how in ("gz", "bz2", "xz")),
        pytest.param(SandboxSpec(archive=archive(**{"../../out": b"x"})), id="archive that climbs"),
        pytest.param(SandboxSpec(files={"/etc/file": b"x"}), id="file outside"),
        pytest.param(SandboxSpec(files={"a": b"x", "a/b": b"x"}), id="file below a file"),
        pytest.param(
            SandboxSpec(files={"a": bytes(3 * MB)}, limits=SandboxLimits(disk_mb=1)), id="no room"
        ),
        pytest.param(
            SandboxSpec(archive=archive(a=bytes(3 * MB)), limits=SandboxLimits(disk_mb=1)),
            id="no room for the archive",
        ),
    ],
)
async def test_what_cannot_be_unpacked_is_a_mistake(boxes: Sandboxes, spec: SandboxSpec) -> None:
    with pytest.raises(InputError):
        async with boxes.open(spec):
            pass
    async with boxes.open(PLAIN) as box:
        assert (await box.exec(["true"])).ok


# What programs used.


async def test_what_programs_used_is_plausible(box: Sandbox) -> None:
    code = """
import os, time
data = bytearray(b"x" * (50 << 20))
with open("file", "wb") as file:
    file.write(data[: 8 << 20])
end = time.process_time() + 0.5
while time.process_time() < end:
    pass
print(len(open("file", "rb").read()), time.process_time())
"""
    began = time.monotonic()
    result = await box.run_python(code)
    elapsed, used = time.monotonic() - began, result.usage
    size, cpu_seconds = map(float, result.stdout.split())
    assert size == 8 * MB
    assert cpu_seconds * 0.9 < used.cpu_seconds < cpu_seconds * 2
    assert used.cpu_seconds * 0.9 < used.wall_seconds <= elapsed
    assert 50 < used.peak_memory_mb < 120
    assert 8 * MB - 4096 < used.written_bytes < 9 * MB
    assert 8 * MB - 4096 < used.read_bytes < 9 * MB
    assert 8 <= used.disk_mb < 9
    assert (used.output_bytes, used.executions, used.killed) == (len(result.stdout), 1, {})
    assert used.peak_processes == 1


async def test_children_are_counted_too(box: Sandbox) -> None:
    used = (
        await box.run_python("""
import os, time
for _ in range(2):
    if os.fork() == 0:
        while time.process_time() < 0.2: pass
        os._exit(0)
os.wait(), os.wait()
""")
    ).usage
    assert used.cpu_seconds > 0.35
    assert used.peak_processes >= 3
    left = await box.run_python("""
import os, time
if os.fork() == 0:
    while time.process_time() < 0.05: pass
    open("spun", "w")
    while True: pass
while not os.path.exists("spun"): time.sleep(0.02)
""")
    assert left.ok and left.usage.cpu_seconds > 0.02


async def test_the_total_is_of_all_programs(box: Sandbox) -> None:
    first = (await box.run_python("data = bytes(40 << 20); print('one')")).usage
    second = (await box.exec(["sh", "-c", "echo second; echo more >&2"])).usage
    killed = (await box.exec(["sleep", "9"], limits=SandboxLimits(wall_seconds=0.1))).usage
    total = await box.total()
    assert total.executions == 3
    assert total.killed == killed.killed == {"wall": 1}
    assert total.output_bytes == 4 + 12
    assert total.wall_seconds == pytest.approx(
        first.wall_seconds + second.wall_seconds + killed.wall_seconds
    )
    assert total.peak_memory_mb == max(
        first.peak_memory_mb, second.peak_memory_mb, killed.peak_memory_mb
    )
