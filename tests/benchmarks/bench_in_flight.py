"""A server with 1,000 rollouts in flight: its memory over time, its CPU, and the lag of its loop.

    python tests/benchmarks/bench_in_flight.py [--rollouts 10000] [--in_flight 1000] [--turns 1]

`envserver serve` with an engine that takes 5 to 15 seconds for a call, so that as many rollouts are
in flight at any time and do not end in waves; the engine and the workers are processes of their
own. Memory is what the server alone holds (RssAnon), looked at when another 1,000 rollouts have
ended: what it needs for those in flight is there after the first 1,000, and what comes later is
growth. Lag is how late each of the loop's 50 ms ticks came; other programs add to it. Exits with 1
where memory still grows at the end, by more than a tenth over the last half of the run.
"""

import sys
import tempfile
import time
from pathlib import Path

import compare_runs as runs
from api_load import Server, asked, judge, show, table
from support.commands import running

MOST_GROWTH = 0.1


def measured(server: Server, rollouts: int, step: int) -> list[list[float]]:
    """Rows of: rollouts so far, in flight, MB, CPU seconds, p99 of the lag in milliseconds."""
    rows: list[list[float]] = []
    while not rows or rows[-1][0] < rollouts:
        time.sleep(1.0)
        done = server.metric("envserver_rollouts_total")
        if done >= step * len(rows):
            flying = server.metric("envserver_rollouts_running")
            lag = 1000 * server.metric("envserver_loop_lag_p99_seconds")
            rows.append([done, flying, server.megabytes(), server.cpu(), lag])
            print(*(f"{value:.1f}" for value in rows[-1]), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    words = asked(__doc__, rollouts=10_000, in_flight=1000, turns=1, call_seconds=10.0)
    with runs.engine(words.call_seconds, 0.5) as engine, tempfile.TemporaryDirectory() as name:
        settings = {
            "--openai.num_max_requests_at_once": 2 * words.in_flight,
            "--rollouts.max_queued_groups": 10**6,
            "--workers.rollouts_per_process": words.in_flight,
            "--port": 0,
            "--store": f"{name}/groups.db",
            "--log_level": "warning",
        }
        pairs = [word for pair in settings.items() for word in pair]
        talk = runs.talking(runs.HERE / "compare_talk.py", engine, words.turns, words.in_flight)
        serve = ("-m", "envserver", "serve", *talk, *pairs)
        with running(*serve, folder=Path(name), program=Path(sys.executable)) as process:
            url = process.wait_for(r"(http://127\.0\.0\.1:\d+)")[1]
            rows = measured(Server("ours", url, process.pid), words.rollouts, 1000)
    title = f"{words.in_flight:,} rollouts of {words.turns} turn(s) in flight"
    shown = table(title, "rollouts", "in flight", "MB", "CPU s", "lag p99 ms", left=0)
    for row in rows:
        shown.add_row(*(f"{value:,.1f}" for value in row))
    show(shown)
    half, last = rows[len(rows) // 2][2], rows[-1][2]
    if last > (1 + MOST_GROWTH) * half:
        judge([f"memory grew from {half:.0f} to {last:.0f} MB over the last half"])


if __name__ == "__main__":
    main()
