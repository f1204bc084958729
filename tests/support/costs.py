"""A pytest plugin: the cost of each test file, for `make test-costs`.

    pytest -p support.costs --costs FILE ...

In: the tests as they run, in one process or in several of xdist. Out: a table in FILE, the most
expensive file first: CPU seconds of the test process and all processes below it, wall seconds,
number of tests. "(start)" is what a test process needs before its first test (imports, collection),
"(controller)" is xdist's own process. The CPU time of a process is counted by whoever waits for it;
that of a daemon whose parent has ended is lost.
"""

import os
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from .process_tree import cpu_seconds, descendants

_Rows = dict[str, list[float]]


class Costs:
    """Adds up what the files of one process cost."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.rows: _Rows = defaultdict(lambda: [0.0, 0.0, 0])
        self.cpu, self.wall = 0.0, time.perf_counter()
        self.file = "(start)"

    def book(self) -> None:
        """Charges what was used since the last call to the current file."""
        own = os.getpid()
        cpu, wall = cpu_seconds({own, *descendants(own)}), time.perf_counter()
        # Less than before: a process whose time was seen has ended unwaited for.
        self.rows[self.file][0] += max(0.0, cpu - self.cpu)
        self.rows[self.file][1] += wall - self.wall
        self.cpu, self.wall = cpu, wall

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, Any, Any]:
        file = item.nodeid.partition("::")[0]
        if file != self.file:
            self.book()
            self.file = file
        self.rows[file][2] += 1
        return (yield)

    def pytest_testnodedown(self, node: Any) -> None:
        for file, row in getattr(node, "workeroutput", {}).get("costs", {}).items():
            self.rows[file] = [a + b for a, b in zip(self.rows[file], row, strict=True)]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        worker = getattr(self.config, "workeroutput", None)
        if worker is None and self.config.getoption("numprocesses", None):
            own = os.times()  # its children are the processes that have reported
            self.rows["(controller)"] = [own.user + own.system, 0.0, 0]
        else:
            self.book()
        if worker is not None:
            worker["costs"] = dict(self.rows)
        else:
            write(Path(self.config.getoption("costs")), self.rows)


def write(path: Path, rows: _Rows) -> None:
    """Writes the table; a folder's line sums its files."""
    total: _Rows = defaultdict(lambda: [0.0, 0.0, 0])
    for file, row in rows.items():
        parts = file.split("/")
        folder = "/".join(parts[: 3 if parts[1:2] == ["unit"] else 2]) if len(parts) > 2 else file
        for name in {folder, "(all)"}:
            total[name] = [a + b for a, b in zip(total[name], row, strict=True)]
    lines = []
    for table in (total, rows):
        lines.append(f"{'cpu s':>9}{'wall s':>9}{'tests':>7}  ")
        ordered = sorted(table.items(), key=lambda entry: -entry[1][0])
        lines += [
            f"{cpu:9.2f}{wall:9.2f}{tests:7.0f}  {name}" for name, (cpu, wall, tests) in ordered
        ]
        lines.append("")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", metavar="FILE", help="write what each file of tests costs to FILE")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("costs"):
        config.pluginmanager.register(Costs(config))
