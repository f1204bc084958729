"""A server with 1,000 rollouts in flight: its memory over time, its CPU, and the lag of its loop.

    python tests/benchmarks/bench_in_flight.py [--rollouts 10000] [--in_flight 1000] [--turns 1]

`envserver serve` with an engine that takes 5 to 15 seconds for a call, so that as many rollouts are
in flight at any time and do not end in waves; the engine and the workers are processes of their
own. Memory is what the server alone holds (RssAnon), looked at when another 1,000 rollouts have
ended: what it needs for those in flight is there after the first 1,000, and what comes later is
growth. Lag is how late each of the loop's 50 ms ticks came; other programs add to it. Exits with 1
where memory still grows at the end, by more than a tenth over the last half of the run.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import compare_runs as runs
from api_load import Server, show, table
from support.commands import running

MOST_GROWTH = 0.1


def number(metrics: str, name: str) -> float:
    """The sum of a metric's values over its labels."""
    lines = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", metrics, re.MULTILINE)
    return sum(map(float, lines))


def measured(server: Server, rollouts: int, step: int) -> list[list[float]]:
    """Rows of: rollouts so far, in flight, MB, CPU seconds, p99 of the lag in milliseconds."""
    rows: list[list[float]] = []
    while not rows or rows[-1][0] < rollouts:
        time.sleep(1.0)
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
            metrics = answer.read().decode()
        done = number(metrics, "envserver_rollouts_total")
        if done >= step * len(rows):
            flying = number(metrics, "envserver_rollouts_running")
            lag = 1000 * number(metrics, "envserver_loop_lag_p99_seconds")
            rows.append([done, flying, server.memory_bytes() / 2**20, server.cpu(), lag])
            print(*(f"{value:.1f}" for value in rows[-1]), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--in_flight", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--call_seconds", type=float, default=10.0)
    words = parser.parse_args()
    with runs.engine(words.call_seconds, 0.5) as engine, tempfile.TemporaryDirectory() as name:
        settings = {
            "--env": runs.HERE / "compare_talk.py",
            "--env.turns": words.turns,
            "--env.group_size": runs.GROUP_SIZE,
            "--env.ensure_scores_are_not_same": "false",
            "--openai.base_url": f"{engine}/v1",
            "--openai.model_name": "m",
            "--openai.num_max_requests_at_once": 2 * words.in_flight,
            "--rollouts.max_concurrent": words.in_flight,
            "--rollouts.max_queued_groups": 10**6,
            "--workers.rollouts_per_process": words.in_flight,
            "--port": 0,
            "--store": f"{name}/groups.db",
            "--log_level": "warning",
        }
        pairs = [str(word) for pair in settings.items() for word in pair]
        program = Path(sys.executable)
        serve = ("-m", "envserver", "serve", *pairs)
        with running(*serve, folder=Path(name), program=program) as process:
            url = process.wait_for(r"(http://127\.0\.0\.1:\d+)")[1]
            rows = measured(Server("ours", url, process.pid), words.rollouts, 1000)
    title = f"{words.in_flight:,} rollouts of {words.turns} turn(s) in flight"
    columns = ("rollouts", "in flight", "MB", "CPU s", "lag p99 ms")
    shown = table(title, *columns, left=0)
    for row in rows:
        shown.add_row(*(f"{value:,.1f}" for value in row))
    show(shown, None)
    half, last = rows[len(rows) // 2][2], rows[-1][2]
    if last > (1 + MOST_GROWTH) * half:
        sys.exit(f"Memory grew from {half:.0f} to {last:.0f} MB over the last half.")


if __name__ == "__main__":
    main()
