"""What the recording proxy costs: CPU of each call, latency, and what is left of an engine's rate.

    python tests/benchmarks/bench_proxy.py [--quick]

Engine, proxy and load are a process each, pinned to cores. First the engine answers at once: then
a call costs what the proxy costs. Then it takes the time of an engine that batches, and what counts
is how much later answers come and how many fewer, beside the least that a proxy made of FastAPI and
httpx does.

CPU time tells the same on a busy machine, give or take a third; rates and latencies do not. Over a
budget it exits with 1.
"""

import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import NamedTuple

import orjson
import proxy_calls as calls
import uvloop
from api_load import asked, judge, show
from api_load import table as columned
from proxy_load import Measured, agents, by_turns, cpu_seconds, for_a_time, pin
from rich.table import Table
from support.commands import Running, running

RUNS = 3
SHARE_KEPT = 0.95
"""Of the engine's own rate at 64 calls in flight, whole or streamed."""
TURNS = 8
"""Calls of each conversation that are measured; the first, a root, is not."""


class Case(NamedTuple):
    """What is asked of an engine that answers at once.

    Args:
        server: see `proxy_servers`; "engine": nothing is between.
        history_tokens: of the first prompt.
        goes_on: each call goes on from the one before; else all are the same first call.
        budget_ms: CPU of the proxy for each call, at 64 in flight: about half as much again as it
            takes on two busy cores of a virtual machine.
    """

    name: str
    server: str
    history_tokens: int = 200
    tools: bool = False
    streamed: bool = False
    goes_on: bool = False
    budget_ms: float | None = None


IN_FLIGHT = (1, 64)
CASES = [
    Case("engine alone, whole", "engine"),
    Case("engine alone, streamed", "engine", streamed=True),
    Case("httpx, whole", "httpx"),
    Case("httpx, streamed", "httpx", streamed=True),
    Case("chat, whole", "chat", budget_ms=0.8),
    Case("chat, streamed", "chat", streamed=True, budget_ms=3.0),
    Case("tokens, first call", "tokens", budget_ms=2.0),
    Case("tokens, goes on, whole", "tokens", goes_on=True, budget_ms=2.5),
    Case("tokens, goes on, streamed", "tokens", streamed=True, goes_on=True, budget_ms=5.0),
    Case("tokens, goes on, tools, whole", "tokens", tools=True, goes_on=True, budget_ms=4.0),
    Case("tokens, goes on, 4,000 tokens", "tokens", 4000, goes_on=True, budget_ms=4.0),
]


class Cores(NamedTuple):
    """Where the processes run; -1: anywhere."""

    proxy: int
    engine: int
    load: int

    def __str__(self) -> str:
        if self.proxy < 0:
            return "Processes cannot be pinned here: all share all cores."
        shared = "share" if self.engine == self.load else "have"
        text = f"Engine and load {shared} core {self.engine}"
        text += "" if self.engine == self.load else f" and {self.load}"
        return text + f", the proxy has core {self.proxy}, beside whatever else runs here."


def choose_cores() -> Cores:
    """The proxy never shares a core with what measures it, unless there is only one."""
    if not hasattr(os, "sched_getaffinity"):
        return Cores(-1, -1, -1)
    free = sorted(os.sched_getaffinity(0))
    return Cores(free[-1], free[0], free[1] if len(free) > 2 else free[0])


class House:
    """The processes that are measured."""

    def __init__(self, stack: ExitStack, cores: Cores) -> None:
        self._stack = stack
        self._cores = cores
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._servers: dict[tuple[str, str], tuple[Running, str]] = {}

    def start_engine(self) -> tuple[str, str]:
        """The addresses of an engine that answers at once, and of one that takes its time."""
        engine = self._run("proxy_engine.py", self._cores.engine)
        _, *ports = engine.wait_for(r"ports (\d+) (\d+)\n").group().split()
        return f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"

    def start(self, names: Sequence[str], engine_url: str) -> None:
        """Starts proxies before that engine."""
        for name, server in {name: self._serve(name, engine_url) for name in names}.items():
            self._servers[name, engine_url] = (server, server.wait_for(r"serves (\S+)\n")[1])

    def urls(self, name: str, engine_url: str, count: int) -> list[str]:
        """Addresses for chats; our proxy's are those of new attempts."""
        root = engine_url if name == "engine" else self._servers[name, engine_url][1]
        if name in ("engine", "httpx"):
            return [f"{root}/v1/chat/completions"] * count
        with urllib.request.urlopen(f"{root}/r/attempts/{count}") as answer:
            keys = orjson.loads(answer.read())
        return [f"{root}/r/{key}/v1/chat/completions" for key in keys]

    def cpu_seconds(self, name: str, engine_url: str) -> float:
        """Of a proxy so far; 0 for none."""
        return 0.0 if name == "engine" else cpu_seconds(self.pid(name, engine_url))

    def pid(self, name: str, engine_url: str) -> int:
        return self._servers[name, engine_url][0].pid

    def _serve(self, name: str, engine_url: str) -> Running:
        return self._run("proxy_servers.py", name, engine_url, self._cores.proxy)

    def _run(self, script: str, *words: object) -> Running:
        path, python = Path(__file__).with_name(script), Path(sys.executable)
        return self._stack.enter_context(running(path, *words, folder=self._folder, program=python))


class Cost(NamedTuple):
    """One measurement; `cpu_ms` is the proxy's for each call."""

    measured: Measured
    cpu_ms: float


def median(costs: Sequence[Cost], what: str) -> float:
    """Of several runs: "rate", "cpu_ms", "p50" or "p99" in milliseconds."""
    of = {
        "rate": lambda cost: cost.measured.rate,
        "cpu_ms": lambda cost: cost.cpu_ms,
        "p50": lambda cost: cost.measured.milliseconds(0.5),
        "p99": lambda cost: cost.measured.milliseconds(0.99),
    }[what]
    return statistics.median(map(of, costs))


def bodies_of(case: Case) -> list[bytes]:
    """What the agents of a case ask, turn by turn."""
    turns = 1 + TURNS if case.goes_on else 1
    shared = {"tools": case.tools, "streamed": case.streamed}
    more = calls.EXACT if case.server in ("engine", "httpx") else {}
    if more and case.streamed:
        more = more | calls.USAGE
    return calls.requests(case.history_tokens, turns, **shared, **more)


async def at_once(house: House, engine_url: str, case: Case, at: int) -> Cost:
    """One run of a case with `at` calls in flight."""
    bodies = bodies_of(case)
    least = 64 if at == 1 else 8 * at
    rounds = -(-least // (TURNS * at)) if case.goes_on else 1
    turns = range(1, 1 + TURNS) if case.goes_on else range(1, 1 + least // at)
    runs: list[Measured] = []
    cpu = 0.0
    for _ in range(rounds):
        async with agents(house.urls(case.server, engine_url, at), bodies) as some:
            await by_turns(some, range(1))
            before = house.cpu_seconds(case.server, engine_url)
            runs.append(await by_turns(some, turns))
            cpu += house.cpu_seconds(case.server, engine_url) - before
    latencies = [latency for measured in runs for latency in measured.latencies]
    rate = statistics.fmean(measured.rate for measured in runs)
    return Cost(Measured(rate, latencies, len(latencies)), 1000 * cpu / len(latencies))


async def table_at_once(house: House, engine_url: str, quick: bool, missed: list[str]) -> Table:
    """Every case, with an engine that answers at once."""
    columns = ("calls", "CPU ms at 1", "at 64", "budget", "p50 ms at 1")
    columns += ("calls/s at 64", "p50 ms", "p99 ms")
    table = columned("An engine that answers at once", *columns)
    for case in CASES:
        costs = {
            at: [await at_once(house, engine_url, case, at) for _ in range(1 if quick else RUNS)]
            for at in IN_FLIGHT
        }
        cpu = {at: median(some, "cpu_ms") for at, some in costs.items()}
        if case.budget_ms is not None and cpu[64] > case.budget_ms:
            missed.append(f"CPU of {case.name}")
        shown = [f"{cpu[at]:.2f}" if cpu[at] else "" for at in IN_FLIGHT]
        shown.append("" if case.budget_ms is None else f"{case.budget_ms:.1f}")
        shown += [f"{median(costs[1], 'p50'):.2f}", f"{median(costs[64], 'rate'):,.0f}"]
        table.add_row(case.name, *shown, *(f"{median(costs[64], p):.1f}" for p in ("p50", "p99")))
    return table


async def with_time(
    house: House, name: str, engine_url: str, bodies: list[bytes], at: int, calls_each: float = 0
) -> Cost:
    """One run of some seconds, or of as long as so many calls take, with an engine that takes
    time."""
    async with agents(house.urls(name, engine_url, at), bodies) as some:
        call_seconds = (await by_turns(some, range(1))).milliseconds(0.5) / 1000
        before = house.cpu_seconds(name, engine_url)
        seconds = calls_each * call_seconds or max(1.0, call_seconds)
        measured = await for_a_time(some, call_seconds, seconds)
        cpu = house.cpu_seconds(name, engine_url) - before
    return Cost(measured, 1000 * cpu / measured.asked)


async def table_with_time(house: House, engine_url: str, quick: bool, missed: list[str]) -> Table:
    """The engine alone, through our proxy and through the thin one, by turns."""
    columns = ("calls", "in flight", "alone/s", "p50 ms", "kept", "p50 +ms", "p99 +ms", "CPU ms")
    columns += ("httpx: kept", "p50 +ms", "p99 +ms", "CPU ms")
    table = columned("An engine that takes time", *columns)
    for streamed, at in product((False, True), (64,) if quick else IN_FLIGHT):
        kind = "streamed" if streamed else "whole"
        usage = calls.USAGE if streamed else {}
        shared = {"tools": False, "streamed": streamed}
        exact = calls.requests(200, 1, **{**calls.EXACT, **usage, **shared})
        bodies = {"engine": exact, "chat": calls.requests(200, 1, **shared), "httpx": exact}
        costs: dict[str, list[Cost]] = {name: [] for name in bodies}
        for _ in range(1 if quick else RUNS):
            for name, some in costs.items():
                some.append(await with_time(house, name, engine_url, bodies[name], at))
        wanted = ("rate", "p50", "p99", "cpu_ms")
        alone, *through = ({what: median(some, what) for what in wanted} for some in costs.values())
        if at == 64 and through[0]["rate"] < SHARE_KEPT * alone["rate"]:
            missed.append(f"rate kept, {kind}")
        cells = [kind, f"{at}", f"{alone['rate']:,.1f}", f"{alone['p50']:,.0f}"]
        for seen in through:
            added = [f"{seen[what] - alone[what]:+,.1f}" for what in ("p50", "p99")]
            cells += [f"{seen['rate'] / alone['rate']:.1%}", *added, f"{seen['cpu_ms']:.2f}"]
        table.add_row(*cells)
    return table


def main() -> None:
    words = asked(__doc__, quick=False)
    cores, missed = choose_cores(), []
    began = time.monotonic()
    print(cores, f"Load average {os.getloadavg()[0]:.1f}.")
    with ExitStack() as stack:
        house = House(stack, cores)
        instant, timed = house.start_engine()
        house.start(["chat", "tokens", "httpx"], instant)
        house.start(["chat", "httpx"], timed)
        pin(cores.load)
        show(uvloop.run(table_at_once(house, instant, words.quick, missed)))
        show(uvloop.run(table_with_time(house, timed, words.quick, missed)))
    print(f"{time.monotonic() - began:.0f} s.")
    judge(missed)


if __name__ == "__main__":
    main()
