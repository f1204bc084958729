"""What a hostile program is, and what it is told about the host; all of them stand in `programs/`.

Every program is bounded by itself: it stops at a few hundred processes or megabytes, what it leaves
behind ends within half a minute, calls that would harm are made with arguments that cannot, and a
broadcast signal is one that nobody minds. So a wall that does not hold costs a red test, not the
machine.
"""

import asyncio
import contextlib
import tomllib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from envserver import InputError, Sandbox, SandboxLimits

PROGRAMS = Path(__file__).with_name("programs")
COMMON = tomllib.loads((PROGRAMS / "common.toml").read_text())
LIMITS = {name: SandboxLimits(**limits) for name, limits in COMMON["limits"].items()}

Told = dict[str, str | int]
"""What a program knows of the host: each is a variable of that name."""
FollowUp = Callable[[Sandbox, Told], Awaitable[bytes]]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A row of a table.

    Args:
        must: what has to happen. An ordinary program (empty) exits with 0, and has `prints` in its
            standard output.
        source: Python after the prelude, or a shell script that has the same names as variables.
        ends: what may end it: reasons of `killed_by`, "exit N" or "signal N"; nothing: anything.
        prints: exactly its standard output, where that matters.
        then: asked of the same sandbox afterwards; what it returns is searched for secrets too.
        seconds: it must have returned by then (its wall time and a minute where unset).
        files: what is in its sandbox from the start.
        needs: a module or command without which it is left out.
        lets_through: the backends that are known not to hold it, or not to let it work.
    """

    name: str
    source: str
    must: str = ""
    language: str = "python"
    limits: SandboxLimits
    ends: tuple[str, ...] = ()
    prints: str | None = None
    then: FollowUp | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    preload: tuple[str, ...] = ()
    seconds: float | None = None
    needs: str | None = None
    lets_through: tuple[str, ...] = ()


def table(name: str) -> tuple[str, list[Program]]:
    """The category and the programs of `programs/NAME.toml`.

    In it: `usual` of all its rows, and `pieces` that stand `before` or `after` a source, or are
    run `then`. `prints_of` is an expression, a number in `files` is so many zeros.
    """
    found = tomllib.loads((PROGRAMS / f"{name}.toml").read_text())
    pieces, usual = found.get("pieces", {}), found.get("usual", {})
    return found["category"], [_program(usual | row, pieces) for row in found["program"]]


def _program(row: dict[str, Any], pieces: dict[str, str]) -> Program:
    before, after = (pieces[row.pop(key)] if key in row else "" for key in ("before", "after"))
    row["source"] = before + row["source"] + after
    row["limits"] = LIMITS[row.get("limits", "usual" if "must" in row else "ample")]
    if "prints_of" in row:
        row["prints"] = eval(row.pop("prints_of"))
    if "then" in row:
        row["then"] = {"it still works": still_works, "its traps are read and written": at_traps}[
            row["then"]
        ]
    if "then_read" in row:
        row["then"] = reading(row.pop("then_read"))
    if "then_run" in row:
        source = row.pop("then_run")
        row["then"] = running(pieces.get(source, source))
    for name, content in (files := row.pop("files", {})).items():
        files[name] = bytes(content) if isinstance(content, int) else content.encode()
    for name in {"ends", "preload", "lets_through"} & row.keys():
        row[name] = tuple(row[name])
    return Program(files=files, **row)


def reading(path: str) -> FollowUp:
    """A read of that path; to be told that there is no such file is fine."""

    async def read(box: Sandbox, told: Told) -> bytes:
        try:
            return await box.read(path)
        except InputError:
            return b""

    return read


def running(source: str) -> FollowUp:
    """A second Python program in the same sandbox, which has the prelude too."""

    async def run(box: Sandbox, told: Told) -> bytes:
        result = await box.run_python(python(source, told), limits=LIMITS["usual"])
        return result.stdout + result.stderr

    return run


async def still_works(box: Sandbox, told: Told) -> bytes:
    """Another program in the same sandbox runs as if nothing had happened."""
    patient = msgspec.structs.replace(LIMITS["usual"], wall_seconds=120.0)
    result = await box.run_python("print('fine')", limits=patient)
    assert result.stdout == b"fine\n", f"the next program ended so: {result}"
    return b""


async def at_traps(box: Sandbox, told: Told) -> bytes:
    """The file tools at every trap that the program has laid."""
    seen = b""
    for name in ("link", "folder/file", "pipe", "chain", "device", "loop", "socket"):
        with contextlib.suppress(InputError):
            seen += await asyncio.wait_for(box.read(name), 60)
        with contextlib.suppress(InputError):
            await asyncio.wait_for(box.write(name, b"written through " + name.encode()), 60)
    return seen


def python(source: str, told: Told) -> str:
    """The whole Python program."""
    known = "".join(f"{name} = {value!r}\n" for name, value in told.items())
    return f"{known}CALLS = {COMMON['calls']!r}\n{COMMON['prelude']}{source}"


def shell(told: Told) -> dict[str, str]:
    """The variables of a shell script."""
    return {name: str(value) for name, value in told.items()}
