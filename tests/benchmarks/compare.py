"""The same work by envserver, two generations of verifiers and atroposlib: `make compare`.

    python tests/benchmarks/compare.py [--rounds 3] [--output docs/benchmarks.md]

Prints one table; with --output also writes it, a plot and how it was made. Ours with its defaults,
theirs with the settings that cost them least: verifiers plays in one process (no worker, no
server), atroposlib's API as its own `run-api` starts it. Some ten minutes on a machine that does
nothing else. Shares of a machine that others use change times, and ratios of one run less.
"""

import asyncio
import datetime
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import api_load as load
import bench_proxy
import compare_runs as runs
from api_load import PEER_PYTHON, ours, theirs
from rich.table import Table
from support.charts import cpu_bars

AT_A_TIME = 64
POOLED = "1,000 rollouts of 1 turn with tokens"
ROLLOUTS = {
    POOLED: (128, runs.Work(640, 1, AT_A_TIME), 1000),
    "1,000 rollouts of 5 turns with tokens": (64, runs.Work(384, 5, AT_A_TIME), 1000),
    "8 rollouts of 120 turns, up to 140,000 tokens": (8, runs.Work(16, 120, 8, more=220), 8),
}
"""By case: how many a short run has, a long run, and of how many the values are told.
The difference of the two runs is free of the start."""
SINGLE = 40
"""Rollouts that are played one at a time."""
TOKENS, GROUPS = (256, 2048), 64
KILLED_ROLLOUTS = 160


@dataclass
class Row:
    """A case: ours and a peer's values of each round; the least counts."""

    case: str
    unit: str
    peer: str
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    def cells(self) -> list[str]:
        mine, other = min(self.ours), min(self.theirs)
        ratio = f"{other / mine:.1f}" if mine > 0 and self.unit != "lost" else ""
        return [self.case, self.unit, _shown(self.ours), self.peer, _shown(self.theirs), ratio]


def _shown(values: list[float]) -> str:
    least, most = (f"{value:,.{2 if value < 10 else 0}f}" for value in (min(values), max(values)))
    plain = all(value == int(value) for value in values)
    least, most = (f"{min(values):.0f}", f"{max(values):.0f}") if plain else (least, most)
    return least if least == most else f"{least} ({most})"


class Rows:
    """All cases, by case, unit and peer, in the order in which they came."""

    def __init__(self) -> None:
        self.of: dict[tuple[str, str, str], Row] = {}
        self.hung = 0

    def add(self, case: str, unit: str, peer: str, mine: float, other: float) -> None:
        row = self.of.setdefault((case, unit, peer), Row(case, unit, peer))
        row.ours.append(mine)
        row.theirs.append(other)


def verifiers() -> dict[str, runs.Play]:
    """Returns how each generation of verifiers plays, by the peer's name."""
    return {"verifiers 0.3": runs.by_verifiers, "verifiers 0.4": runs.by_verifiers_v1}


def beside_verifiers(
    rows: Rows, case: str, unit: str, measure: Callable[[runs.Play], float]
) -> None:
    mine = measure(runs.by_us)
    for peer, how in verifiers().items():
        rows.add(case, unit, peer, mine, measure(how))


UNITS = ("s of CPU", "s", "MB", "lost")


def beyond_the_start(rows: Rows, how: runs.Play, url: str, case: str) -> tuple[float, ...]:
    """Returns what UNITS says of the rollouts of a case."""
    few, work, count = ROLLOUTS[case]
    short, long = (runs.play(how, url, each) for each in (work._replace(rollouts=few), work))
    rows.hung += short.hung + long.hung
    each = count / (work.rollouts - few)
    lost = float(few + work.rollouts - short.whole - long.whole)
    cpu, wall = (long.cpu - short.cpu) * each, (long.wall - short.wall) * each
    return cpu, wall, long.megabytes, lost


def play_rollouts(rows: Rows, url: str) -> None:
    """Rollouts of one, five and 120 turns, many at a time; then one at a time."""
    for case in ROLLOUTS:
        mine = beyond_the_start(rows, runs.by_us, url, case)
        peers = {peer: beyond_the_start(rows, how, url, case) for peer, how in verifiers().items()}
        for number, unit in enumerate(UNITS):
            for peer, other in peers.items():
                rows.add(case, unit, peer, mine[number], other[number])
    play_isolated(rows, url)
    case = "from an answer to the agent's next call"
    beside_verifiers(rows, case, "ms", lambda how: runs.gap(how, url, SINGLE, 5))


def play_isolated(rows: Rows, url: str) -> None:
    """Rollouts of one turn, each agent in a process of its own."""
    for how, what in (
        (runs.alone, "a process for each agent"),
        (runs.walled, "a sandboxed process for each agent"),
    ):
        cpu, *_, lost = beyond_the_start(rows, how, url, POOLED)
        if lost == ROLLOUTS[POOLED][0] + ROLLOUTS[POOLED][1].rollouts:
            continue  # this machine can make no sandbox
        for peer in verifiers():
            case = f"1,000 rollouts of 1 turn, {what} (peer: none)"
            rows.add(case, "s of CPU", peer, cpu, rows.of[POOLED, "s of CPU", peer].theirs[-1])


def post_and_fetch(rows: Rows) -> None:
    found = []
    for start in (ours, theirs):
        with start() as server:
            made = asyncio.run(runs.measure_posts(server, TOKENS, GROUPS))
            found.append((made, server.megabytes()))
    (mine, memory), (other, other_memory) = found
    for case in mine:
        rows.add(case, "ms of CPU", "atroposlib", mine[case], other[case])
    rows.add("memory of the server after these", "MB", "atroposlib", memory, other_memory)


def pass_calls(rows: Rows) -> None:
    """An agent's call through our proxy, and through the least that FastAPI and httpx can do."""
    with ExitStack() as stack:
        house = bench_proxy.House(stack, bench_proxy.choose_cores())
        url, _ = house.start_engine()
        house.start(("chat", "httpx"), url)

        def cost(server: str, at: int) -> bench_proxy.Cost:
            return asyncio.run(bench_proxy.at_once(house, url, bench_proxy.Case("", server), at))

        cpu = [cost(server, AT_A_TIME).cpu_ms for server in ("chat", "httpx")]
        alone, *through = (
            cost(server, 1).measured.milliseconds(0.5) for server in ("engine", "chat", "httpx")
        )
    case, peer = "a call through a proxy", "FastAPI and httpx"
    rows.add(f"{case}, {AT_A_TIME} at a time", "ms of CPU", peer, *cpu)
    rows.add(f"{case}, one at a time", "ms later", peer, *(each - alone for each in through))


def kill(rows: Rows, url: str) -> None:
    """kill -9 of what plays, and of the server that holds groups."""

    def lost_by(how: runs.Play) -> float:
        killed = runs.play(how, url, runs.Work(KILLED_ROLLOUTS, 5, AT_A_TIME), kill=True)
        rows.hung += killed.hung
        return float(KILLED_ROLLOUTS - killed.whole)

    case = f"a worker killed in the middle of {KILLED_ROLLOUTS} rollouts"
    beside_verifiers(rows, case, "lost", lost_by)
    case = f"the server killed with {GROUPS} groups waiting"
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        servers = (partial(ours, store=f"{folder}/store.db"), theirs)
        rows.add(case, "lost", "atroposlib", *(runs.lost(start, GROUPS) for start in servers))


HEADS = ("", "unit", "envserver", "peer", "peer's", "times")


def table(rows: Rows) -> Table:
    shown = load.table("the least of all rounds (the most)", *HEADS, left=2)
    for row in rows.of.values():
        shown.add_row(*row.cells())
    return shown


def _version(python: Path | str, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return f"{package} {found.stdout.strip() or 'unknown'}"


def facts(rounds: int, load: tuple[float, float]) -> list[str]:
    """Returns the machine, the versions, the date and the command, a line each."""
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    installed = ((runs.VERIFIERS, "verifiers"), (runs.VERIFIERS_V1, "verifiers"))
    peers = [_version(*each) for each in (*installed, (PEER_PYTHON, "atroposlib"))]
    return [
        f"{os.cpu_count()} cores, {pages * page / 2**30:.0f} GB, {platform.system()} on "
        f"{platform.machine()}; load {load[0]:.1f} at the start, {load[1]:.1f} at the end",
        f"Python {platform.python_version()}, {_version(sys.executable, 'envserver')}, "
        + ", ".join(peers),
        f"{datetime.datetime.now(datetime.UTC):%d %B %Y}, `make compare`, rounds: {rounds}",
    ]


def page(rows: Rows, said: list[str]) -> str:
    lines = [f"| {' | '.join(HEADS)} |", "|---|---|---:|---|---:|---:|"]
    lines += [f"| {' | '.join(row.cells())} |" for row in rows.of.values()]
    body = (Path(__file__).parent / "compare_page.txt").read_text()
    return (
        body.replace("{facts}", "\n".join(f"- {line}." for line in said))
        .replace("{hung}", str(rows.hung))
        .replace("{table}", "\n".join(lines))
    )


def main() -> int:
    arguments = load.asked(__doc__, rounds=3, output=Path)
    for python, name in (
        (runs.VERIFIERS, "verifiers-peer"),
        (runs.VERIFIERS_V1, "verifiers-peer"),
        (PEER_PYTHON, "atropos-peer"),
    ):
        if not python.exists():
            print(f"A peer is missing: make {name}", file=sys.stderr)
            return 2
    rows, began = Rows(), os.getloadavg()[0]
    for number in range(arguments.rounds):
        with runs.engine() as url:
            play_rollouts(rows, url)
            post_and_fetch(rows)
            pass_calls(rows)
            kill(rows, url)
        load.show(table(rows))
        said = facts(number + 1, (began, os.getloadavg()[0]))
        print(*said, f"{rows.hung} runs hung", sep="\n", flush=True)
        if arguments.output is not None:
            arguments.output.write_text(text := page(rows, said))
            arguments.output.with_suffix(".svg").write_text(cpu_bars(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
