"""Runs all hostile programs, and the ordinary ones, against one backend; tells what got through.

    python -m hostile.driver BACKEND [--only WORDS] [--every 1] [--at-a-time 8] [--image IMAGE]
        [--elsewhere]                                                                   (in tests/)

It plays the server: the secrets are in its own environment, arguments and folder. The report is the
last line of its output, as JSON.
"""

import argparse
import asyncio
import ctypes
import importlib.util
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from support.sandboxes import sandbox_machine, sandboxes

from envserver import ExecResult, Sandbox, SandboxError, Sandboxes, SandboxSpec
from envserver.sandbox.machines import Machines
from envserver.sandbox.maker import RemoteAddress

from .host import Host, children, random_secret
from .program import Program, Told, python, shell, table

TABLES = [
    "disclosure",
    "processes",
    "cleanup",
    "kernel",
    "limits",
    "output",
    "files",
    "network",
    "channel",
    "agents",
]
_GRACE_SECONDS = 60.0
_SECRET_VARIABLE = "SERVER_API_KEY"
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Verdict:
    """`escapes`: what it got that it must not; empty: it was held."""

    category: str
    name: str
    lets_through: tuple[str, ...]
    escapes: list[str] = field(default_factory=list)
    ended: str = ""
    seconds: float = 0.0


@dataclass
class Report:
    """`afterwards`: what is wrong when all sandboxes and their service are closed."""

    backend: str
    user: int
    programs: list[Verdict]
    controls: list[Verdict]
    afterwards: list[str]
    seconds: float


async def report_on(
    backend: str, only: str, every: int, at_a_time: int, image: str, elsewhere: bool
) -> Report:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        Path(name).chmod(0o755)
        os.chdir(name)
        making = _made(backend, at_a_time + 1, image, elsewhere)
        async with _host(making, Path(name)) as (boxes, host, isolation):
            turns = asyncio.Semaphore(at_a_time)

            async def one(category: str, program: Program) -> Verdict:
                async with turns:
                    verdict = Verdict(category, program.name, program.lets_through)
                    if program.must:
                        await _try_hostile(program, verdict, boxes, host)
                    else:
                        await _try_ordinary(program, verdict, boxes)
                    return verdict

            async def those(*names: str) -> list[Verdict]:
                chosen = [
                    (category, program)
                    for category, programs in map(table, names)
                    for program in programs
                    if only in f"{category}: {program.name}" and _is_there(program.needs, image)
                ]
                return list(await asyncio.gather(*(one(*each) for each in chosen[::every])))

            programs = await those(*TABLES)
            ordinary = await those("controls")
        os.chdir("/")
        afterwards = [f"process {pid} is left: {words}" for pid, words in children().items()]
    took = time.monotonic() - began
    return Report(isolation, os.getuid(), programs, ordinary, afterwards, took)


@asynccontextmanager
async def _made(
    backend: str, concurrent: int, image: str, elsewhere: bool
) -> AsyncIterator[tuple[Sandboxes, str]]:
    """Sandboxes, and the address of their supervisor. `elsewhere`: as on another machine."""
    if not elsewhere:
        async with sandboxes(backend, concurrent=concurrent, image=image) as boxes:
            yield boxes, boxes._address
        return
    config = {"backend": backend, "concurrent": concurrent, "docker_image": image}
    async with (
        sandbox_machine(**config) as served,
        Machines(RemoteAddress((served.url,))) as machines,
    ):
        yield machines, served.machine.maker._address  # type: ignore[attr-defined]


@asynccontextmanager
async def _host(
    making: AbstractAsyncContextManager[tuple[Sandboxes, str]], folder: Path
) -> AsyncIterator[tuple[Sandboxes, Host, str]]:
    """Sandboxes, the host beside them, and a neighbour with secrets of its own."""
    known = [
        os.environ[_SECRET_VARIABLE],
        random_secret("neighbour"),
        random_secret("neighbour-argv"),
    ]
    async with (
        making as (boxes, service),
        boxes.open(SandboxSpec(files={"neighbour.txt": known[1].encode()})) as neighbour,
    ):
        running = asyncio.create_task(_stay(neighbour, known))
        # Programs try to reach the service itself.
        with Host(folder, secrets=known, service=service) as host:
            yield boxes, host, neighbour.isolation
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _stay(neighbour: Sandbox, words: list[str]) -> None:
    """The neighbour runs programs all the time, with a secret in arguments and elsewhere."""
    source = 'echo "$0" | tee "$TMPDIR/neighbour.txt" > /dev/null; sleep 5'
    while True:
        await neighbour.exec(["sh", "-c", source, words[2]], env={"SECRET": words[1]})


async def _try_hostile(program: Program, verdict: Verdict, boxes: Sandboxes, host: Host) -> None:
    """Runs it and its follow-up in a sandbox of its own, and looks at the host before the end."""
    mark = f"hx{secrets.token_hex(5)}"
    with ExitStack() as stack:
        victim = stack.enter_context(host.victim()) if "VICTIM" in program.source else None
        told = host.told(mark, victim)
        async with _knocking(int(told["FREE_PORT"]), mark) as guest:
            seen = await _use_sandbox(program, verdict, boxes, host, told)
        said = f"GOT-IN {mark}".encode()
        verdict.escapes += [
            line[line.index(said) + len(said) + 1 :].decode(errors="replace")
            for line in seen.splitlines()
            if said in line
        ]
        verdict.escapes += guest + host.secrets_in(seen)
        verdict.escapes += host.traces_of(mark) + host.changes_by(mark)
        verdict.escapes += victim.harm() if victim else []


async def _use_sandbox(
    program: Program, verdict: Verdict, boxes: Sandboxes, host: Host, told: Told
) -> bytes:
    """All that came out of the sandbox, by the program or by reading what it left."""
    seen = b""
    spec = SandboxSpec(env=shell(told), limits=program.limits, preload=program.preload)
    try:
        async with boxes.open(spec) as box:
            began = time.monotonic()
            result = await _run(box, program, told)
            verdict.seconds = round(time.monotonic() - began, 2)
            verdict.ended = result.killed_by or _ending(result)
            seen = result.stdout + result.stderr
            verdict.escapes += _of_result(program, result, verdict)
            verdict.escapes += host.traces_of(str(told["MARK"]))
            if program.then is not None:
                seen += await program.then(box, told)
    except SandboxError as error:
        verdict.escapes.append(f"{type(error).__name__}: {error}")
    except AssertionError as error:
        verdict.escapes.append(str(error))
    return seen


async def _run(box: Sandbox, program: Program, told: Told) -> ExecResult:
    if program.language == "shell":
        argv = ["/bin/sh", "-c", program.source, str(told["MARK"])]
        return await box.exec(argv, limits=program.limits)
    return await box.run_python(python(program.source, told), limits=program.limits)


def _ending(result: ExecResult) -> str:
    return f"signal {result.signal}" if result.signal is not None else f"exit {result.exit}"


def _of_result(program: Program, result: ExecResult, verdict: Verdict) -> list[str]:
    found = []
    if program.ends and verdict.ended not in program.ends:
        told = result.stderr[-300:].decode(errors="replace")
        found.append(f"ended by {verdict.ended}, not {' or '.join(program.ends)}: {told}")
    if program.prints is not None and result.stdout.decode("latin-1") != program.prints:
        found.append(f"its output is told as {result.stdout[:200]!r}")
    if max(len(result.stdout), len(result.stderr)) > program.limits.output_kb * 1024:
        found.append(f"{len(result.stdout)} and {len(result.stderr)} bytes of output came")
    if verdict.seconds > (program.seconds or program.limits.wall_seconds + _GRACE_SECONDS):
        found.append(f"it took {verdict.seconds:.1f} s")
    if result.usage.peak_memory_mb > 4 * program.limits.memory_mb:
        found.append(f"it had {result.usage.peak_memory_mb:.0f} MB")
    return found


@asynccontextmanager
async def _knocking(port: int, mark: str) -> AsyncIterator[list[str]]:
    """Meanwhile the host tries to reach a server of the sandbox; what came of it is in the list."""
    told: list[str] = []

    async def knock() -> None:
        while not told:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                if mark.encode() in await asyncio.wait_for(reader.read(100), 60):
                    told.append("the host could connect to it")
                writer.close()
            except (OSError, TimeoutError):
                await asyncio.sleep(0.2)

    knocking = asyncio.create_task(knock())
    try:
        yield told
    finally:
        knocking.cancel()
        await asyncio.gather(knocking, return_exceptions=True)


async def _try_ordinary(program: Program, verdict: Verdict, boxes: Sandboxes) -> None:
    spec = SandboxSpec(files=program.files, limits=program.limits)
    try:
        async with boxes.open(spec) as box:
            if program.language == "shell":
                result = await box.exec(["/bin/sh", "-c", program.source])
            else:
                result = await box.run_python(program.source)
    except SandboxError as error:
        verdict.escapes.append(f"{type(error).__name__}: {error}")
        return
    verdict.ended = result.killed_by or _ending(result)
    verdict.seconds = round(result.usage.wall_seconds, 2)
    assert program.prints is not None
    if not result.ok or program.prints not in result.stdout.decode():
        told = (result.stdout[-500:] + result.stderr[-1500:]).decode(errors="replace")
        verdict.escapes.append(f"does not work ({verdict.ended}): {told}")


def _is_there(needed: str | None, image: str) -> bool:
    """Whether programs have the module or command; images are asked for Python only."""
    if needed is None:
        return True
    return not image and bool(importlib.util.find_spec(needed) or shutil.which(needed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backend")
    parser.add_argument("--only", default="", help="words in `category: name`")
    parser.add_argument("--every", type=int, default=1, help="the first of so many programs")
    parser.add_argument("--elsewhere", action="store_true", help="as sandboxes of a machine")
    parser.add_argument("--at-a-time", type=int, default=8)
    parser.add_argument("--image", default="", help="for the backend docker")
    arguments = parser.parse_args()
    if _SECRET_VARIABLE not in os.environ:  # it must be there from the process's first moment
        os.environ[_SECRET_VARIABLE] = random_secret("server")
        os.execv(sys.executable, [sys.executable, "-m", "hostile.driver", *sys.argv[1:]])
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    print(json.dumps(asdict(asyncio.run(report_on(**vars(arguments))))))


if __name__ == "__main__":
    main()
