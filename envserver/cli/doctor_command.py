"""`envserver doctor`: shows what this machine can do, above all which sandbox backends work."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..settings.config import Logged, LogLevel, SandboxConfig
from . import lean_imports
from .command_line import CommandSpec

if TYPE_CHECKING:
    from ..sandbox.machine_messages import Load
    from ..sandbox.probe import ProbeReport
    from .console import Console


SUMMARY = """Shows what this machine can do: Python, git, memory, and which sandbox backends
really contain model-written programs (small programs are run in each and try to escape). Exit
status 0: a sandbox works; 1: none works, and the output says how to fix it."""


class DoctorSettings(Logged):
    sandbox: SandboxConfig = SandboxConfig()
    as_json: bool = False
    """Print everything, including each escape attempt, as one JSON object."""
    log_level: LogLevel = "error"


COMMAND = CommandSpec("doctor", SUMMARY, DoctorSettings)

_LEAST_OPEN_FILES = 4096
_MB = 2**20


class Fact(msgspec.Struct, frozen=True):
    name: str
    value: str
    note: str = ""


def run(argv: list[str]) -> int:
    with lean_imports():
        from .console import Console, show_json
        from .loop import run_loop, show_logs

    settings = COMMAND.read(argv)
    show_logs(settings)
    facts = machine_facts()
    reports = run_loop(_probe(settings.sandbox))
    taken = _taken(reports, settings.sandbox.backend)
    machines = run_loop(look_at_machines(settings.sandbox))
    if machines:
        taken = "remote" if any(machine.load is not None for machine in machines) else None
    if settings.as_json:
        found = {"machine": facts, "backends": reports, "backend": taken, "machines": machines}
        show_json(found)
    else:
        _show(Console(), facts, reports, machines, taken)
    return 0 if taken else 1


async def _probe(config: SandboxConfig) -> list[ProbeReport]:
    from ..sandbox.service import ORDER, probe

    # One after the other: they would slow each other's time limits down.
    backends = [*ORDER, "docker"]
    if config.backend == "unsafe-local":
        backends.append(config.backend)
    return [await probe(backend, config) for backend in backends]


def _taken(reports: Sequence[ProbeReport], wanted: str) -> str | None:
    from ..sandbox.service import ORDER

    allowed = ORDER if wanted == "auto" else (wanted,)
    return next((each.backend for each in reports if each.works and each.backend in allowed), None)


def machine_facts() -> list[Fact]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = "too few for many rollouts: raise the hard limit" if 0 <= hard < _LEAST_OPEN_FILES else ""
    git = _git_version()
    return [
        Fact("Python", f"{platform.python_version()} at {sys.executable}"),
        Fact("system", f"{platform.system()} {platform.release()} on {platform.machine()}"),
        Fact("user", "root" if os.geteuid() == 0 else f"uid {os.geteuid()}"),
        Fact("git", git or "none", "" if git else "needed by agents that edit repositories"),
        Fact("processors", str(len(os.sched_getaffinity(0)))),
        Fact("memory", _memory()),
        Fact("cgroups", _cgroups()),
        Fact("open files", f"{soft:,} of {hard:,}", few),
        Fact("agents", _agents() or "none (envserver agents install NAME)"),
    ]


def _agents() -> str:
    from ..harnesses import HARNESSES
    from ..harnesses.installing import installed_version

    versions = {name: installed_version(name) for name in HARNESSES}
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def _git_version() -> str:
    program = shutil.which("git")
    if program is None:
        return ""
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.strip().removeprefix("git version ")


def _memory() -> str:
    lines = Path("/proc/meminfo").read_text().splitlines()
    kilobytes = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines)}
    free, whole = kilobytes["MemAvailable"] // 1024, kilobytes["MemTotal"] // 1024
    bound = _memory_limit()
    limit = f", {int(bound) // _MB:,} MB for this process" if bound.isdigit() else ""
    return f"{free:,} MB free of {whole:,} MB{limit}"


def _cgroups() -> str:
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists():
        return "not version 2: memory and CPU time are sampled"
    place = _own_cgroup()
    ours = place is not None and os.access(place, os.W_OK) and os.geteuid() != 0
    return f"version 2, {'delegated to this process' if ours else 'not delegated to this process'}"


def _memory_limit() -> str:
    """ "" or "max" if there is none."""
    place = _own_cgroup()
    try:
        return (place / "memory.max").read_text().strip() if place is not None else ""
    except OSError:
        return ""


def _own_cgroup() -> Path | None:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return Path(f"/sys/fs/cgroup{line.removeprefix('0::')}")
    return None


def _show(
    console: Console,
    facts: Sequence[Fact],
    reports: Sequence[ProbeReport],
    machines: Sequence[MachineFact],
    taken: str | None,
) -> None:
    from ..sandbox.probe import WEAKNESSES
    from .console import table

    notes = (f" [yellow]({fact.note})[/]" if fact.note else "" for fact in facts)
    rows = [(fact.name, f"{fact.value}{note}") for fact, note in zip(facts, notes, strict=True)]
    console.print(table(("", ""), rows, show_header=False))
    for report in reports:
        console.print()
        _show_backend(console, report)
    console.print()
    if machines:
        show_machines(console, machines)
        found = "are made by these machines" if taken else "cannot be made: no machine answers"
        console.print(f"[bold {'green' if taken else 'red'}]Sandboxes {found}.[/]")
        return
    if taken:
        console.print(f"[bold green]Sandboxes use the backend {taken}.[/]", highlight=False)
        if taken in WEAKNESSES:
            _show_stronger(console, reports)
        return
    console.print("[bold red]No sandbox backend works on this machine.[/]", highlight=False)
    for step in dict.fromkeys(step for report in reports for step in report.remedies):
        console.say(f"  - {step}")


def _show_stronger(console: Console, reports: Sequence[ProbeReport]) -> None:
    stronger = [each for each in reports if each.backend == "namespace" and not each.works]
    for report in stronger:
        console.say(f"For the stronger backend {report.backend}:")
        for step in report.remedies:
            console.say(f"  - {step}")


def _show_backend(console: Console, report: ProbeReport) -> None:
    verdict = "[green]works[/]" if report.works else "[red]does not work[/]"
    console.print(f" backend [bold]{report.backend}[/]: {verdict}", highlight=False)
    if not report.checks:
        console.say(f"     {report.failure}")
    for check in report.checks:
        console.say(f"   {'+' if check.held else '-'} {check.name}")
        for line in check.tried if not check.held else ():
            console.say(f"       {line}")
    for weakness in report.weaknesses if report.works else ():
        console.say(f"     it does not contain {weakness}")


class MachineFact(msgspec.Struct, frozen=True):
    url: str
    load: Load | None
    problem: str = ""


async def look_at_machines(config: SandboxConfig) -> list[MachineFact]:
    from ..sandbox.machines import Machines
    from ..sandbox.source import address_of

    if not config.remote:
        return []
    async with Machines(address_of(config)) as machines:
        await machines.look()
        return [
            MachineFact(machine.url, None if machine.problem else machine.load, machine.problem)
            for machine in machines.known
        ]


def show_machines(console: Console, machines: Sequence[MachineFact]) -> None:
    for machine in machines:
        load = machine.load
        if load is None:
            text = f"does not work: {machine.problem}"
        else:
            state = "about to stop" if load.draining else "works"
            text = (
                f"{state} ({load.backend}), {load.open} of {load.sandboxes} sandboxes open, "
                f"{load.waiting} requests waiting, {load.running} of {load.room} programs "
                f"running, {load.queued} queued"
            )
        console.say(f" sandbox machine {machine.url}: {text}")
