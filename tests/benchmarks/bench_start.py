"""Measures what commands take to start: CPU of all their processes, in seconds.

    python tests/benchmarks/bench_start.py [--rounds 5]

`run-api` and `serve` until they answer, `process` with its first group of eight rollouts to its
end, `--help`; they take turns. Out: a table with the least, the median and the budget. Exits with 1
when a least is over its budget.
"""

import os
import re
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from api_load import asked, body_of, judge, show
from api_load import table as columned
from support.commands import ENVSERVER, environment_variables, until
from support.process_tree import cpu_seconds, descendants

_SERVER: Final = ("--port", "0")
_SIMULATED: Final = ("--env", "math", "--model", "sim")


class Case(NamedTuple):
    """A command; budget: seconds of CPU that a quiet core of a good machine may take."""

    words: tuple[str, ...]
    budget: float


CASES: Final = (
    Case(("--help",), 0.3),
    Case(("run-api", *_SERVER, "--store", "store.db"), 0.8),
    Case(("serve", *_SIMULATED, *_SERVER), 1.5),
    Case(("process", *_SIMULATED, "--limit", "1", "--out", "groups.jsonl"), 1.2),
)


def seconds(words: tuple[str, ...]) -> float:
    """CPU of one start, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="bench-start-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(ENVSERVER), *words],
                cwd=folder,
                env=environment_variables(),
                stdout=output,
                stderr=output,
            )
        if not set(_SERVER) <= set(words):
            _, status, used = os.wait4(process.pid, 0)
            assert status == 0, log.read_text()
            return used.ru_utime + used.ru_stime
        try:
            pattern = r"http://127\.0\.0\.1:\d+"
            url = until(lambda: re.search(pattern, log.read_text()), log.read_text, alive=process)
            until(lambda: body_of(f"{url[0]}/readyz"), log.read_text, alive=process)
            return cpu_seconds({process.pid, *descendants(process.pid)})
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    rounds = asked(__doc__, rounds=5).rounds
    for case in CASES:  # what is read from disk is read
        seconds(case.words)
    taken = [[seconds(case.words) for case in CASES] for _ in range(rounds)]
    table = columned("Seconds of CPU", "command", "least", "median", "budget")
    missed = []
    for case, tries in zip(CASES, zip(*taken, strict=True), strict=True):
        cells = (min(tries), statistics.median(tries), case.budget)
        table.add_row(f"envserver {case.words[0]}", *(f"{value:.2f}" for value in cells))
        missed += [case.words[0]] if min(tries) > case.budget else []
    show(table)
    judge(missed)


if __name__ == "__main__":
    main()
