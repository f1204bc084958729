"""What a short program costs in a sandbox, beside a plain process and a cold bubblewrap.

    python tests/benchmarks/bench_sandbox.py [--backend auto] [--executions 300] [--only WORDS]

Each row is measured one, two and sixteen at a time; CPU is that of all processes together (this one
too).
Rates on a shared machine swing; CPU and the ratios of one run are what to compare.
"""

import asyncio
import importlib.util
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from api_load import asked, cpu_below, show
from api_load import table as columned
from rich.table import Table
from support.sandboxes import sandboxes

from envserver import Sandboxes, SandboxSpec

AT_A_TIME = (1, 2, 16)
P50_BUDGET_MS = 10.0
PRELOAD_BUDGET = 7.0
ISOLATED_PYTHON = "python -I -S -c pass"
FRESH = "fresh sandbox, run_python, close"

Execution = Callable[[], Awaitable[None]]
"""One execution, from the wish to its result."""


@dataclass(frozen=True)
class Measured:
    """Milliseconds, by how many at a time: `p50[1]` ..."""

    p50: dict[int, float]
    p99: dict[int, float]
    per_second: dict[int, float]
    cpu: dict[int, float]

    @property
    def mean_cpu(self) -> float:
        return statistics.mean(self.cpu.values())


async def measure(execution: Execution, count: int) -> Measured:
    result = Measured({}, {}, {}, {})
    await execution()
    for at_a_time in AT_A_TIME:
        took = []
        waiting = iter(range(max(count, 2 * at_a_time)))

        async def worker(waiting: Iterator[int] = waiting, took: list[float] = took) -> None:
            for _ in waiting:
                began = time.perf_counter()
                await execution()
                took.append((time.perf_counter() - began) * 1000)

        cpu, began = cpu_below() + time.process_time(), time.perf_counter()
        await asyncio.gather(*[worker() for _ in range(at_a_time)])
        seconds = time.perf_counter() - began
        cpu = cpu_below() + time.process_time() - cpu
        result.cpu[at_a_time] = cpu / len(took) * 1000
        result.per_second[at_a_time] = len(took) / seconds
        result.p50[at_a_time] = statistics.median(took)
        result.p99[at_a_time] = statistics.quantiles(took, n=100)[-1]
    return result


def process(*words: str) -> Execution:
    """A plain process, waited for in a thread; numpy in it has one thread, as in sandboxes."""
    env = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

    async def execution() -> None:
        await asyncio.to_thread(subprocess.run, words, check=True, capture_output=True, env=env)

    return execution


def bubblewrap() -> Execution:
    words = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-all"]
    words += ["--tmpfs", "/tmp", "--die-with-parent", sys.executable, "-I", "-S", "-c", "pass"]
    return process(*words)


def fresh(boxes: Sandboxes, source: str, *preload: str) -> Execution:
    spec = SandboxSpec(preload=preload)

    async def execution() -> None:
        async with boxes.open(spec) as box:
            result = await box.run_python(source)
        assert result.ok, result

    return execution


@asynccontextmanager
async def opened(boxes: Sandboxes, python: bool) -> AsyncIterator[Execution]:
    """Programs in sandboxes that are open already."""
    async with AsyncExitStack() as stack:
        those = [
            await stack.enter_async_context(boxes.open(SandboxSpec()))
            for _ in range(max(AT_A_TIME))
        ]

        async def execution() -> None:
            box = those.pop()
            result = await (box.run_python("pass") if python else box.exec(["true"]))
            those.append(box)
            assert result.ok, result

        yield execution


@asynccontextmanager
async def executions(boxes: Sandboxes) -> AsyncIterator[dict[str, tuple[Execution, float]]]:
    """Each with the share of all executions that it is worth."""
    python = sys.executable
    rows = {"true": (process("/bin/true"), 1.0)}
    rows |= {ISOLATED_PYTHON: (process(python, "-I", "-S", "-c", "pass"), 1.0)}
    if shutil.which("bwrap"):
        rows["cold bwrap, python -I -S -c pass"] = (bubblewrap(), 0.5)
    rows[FRESH] = (fresh(boxes, "pass"), 1.0)
    for name in ("numpy", "sympy"):
        if importlib.util.find_spec(name):
            share = 0.1 if name == "sympy" else 0.2
            rows[f"python -c 'import {name}'"] = (process(python, "-c", f"import {name}"), share)
            rows[f"{FRESH}, {name} preloaded"] = (fresh(boxes, f"import {name}", name), 1.0)
    async with opened(boxes, True) as run_python, opened(boxes, False) as run_true:
        rows["open sandbox, run_python"] = (run_python, 1.0)
        rows["open sandbox, exec true"] = (run_true, 1.0)
        yield rows


def table(rows: dict[str, Measured], title: str) -> Table:
    each = "\n" + " / ".join(map(str, AT_A_TIME))
    headings = ("p50 ms", "p99 ms", "per second", "CPU ms")
    shown = columned(title, "what", *(heading + each for heading in headings))
    for name, one in rows.items():
        cells = [f"{{:.{digits}f}}" for digits in (1, 1, 0, 1)]
        texts = [
            " / ".join(cell.format(column[at_a_time]) for at_a_time in AT_A_TIME)
            for cell, column in zip(cells, (one.p50, one.p99, one.per_second, one.cpu), strict=True)
        ]
        shown.add_row(name, *texts)
    return shown


def budgets(rows: dict[str, Measured]) -> Iterator[str]:
    """Each budget, and whether it is met."""

    def line(what: str, value: float, limit: float, is_met: bool) -> str:
        return f"{'met   ' if is_met else 'MISSED'} {what}: {value:.1f} (budget {limit:.1f})"

    if FRESH in rows:
        p50 = rows[FRESH].p50[1]
        yield line("p50 ms of a fresh sandbox", p50, P50_BUDGET_MS, p50 <= P50_BUDGET_MS)
    if {FRESH, ISOLATED_PYTHON} <= rows.keys():
        ours, plain = rows[FRESH].mean_cpu, rows[ISOLATED_PYTHON].mean_cpu
        yield line(f"CPU ms of it, beside {ISOLATED_PYTHON}", ours, plain, ours <= plain)
    for name in ("numpy", "sympy"):
        there, here = f"python -c 'import {name}'", f"{FRESH}, {name} preloaded"
        if {there, here} <= rows.keys():
            times = rows[there].mean_cpu / rows[here].mean_cpu
            what = f"times cheaper in CPU with {name} preloaded"
            yield line(what, times, PRELOAD_BUDGET, times >= PRELOAD_BUDGET)


async def main(backend: str, count: int, only: str) -> None:
    rows = {}
    async with sandboxes(backend, concurrent=64) as boxes, executions(boxes) as those:
        async with boxes.open(SandboxSpec()) as box:
            title = f"backend {box.isolation}"
        for name, (execution, share) in those.items():
            if only in name:
                rows[name] = await measure(execution, int(count * share))
    show(table(rows, title))
    print(*budgets(rows), sep="\n")


if __name__ == "__main__":
    arguments = asked(__doc__, backend="auto", executions=300, only="")
    asyncio.run(main(arguments.backend, arguments.executions, arguments.only))
