"""A server with 1,000 rollouts in flight: its memory over time, its CPU, and the lag of its loop.

    python tests/benchmarks/bench_in_flight.py [--rollouts 10000] [--in_flight 1000] [--turns 1]
    python tests/benchmarks/bench_in_flight.py --in_flight 256 --turns 40 --more 5000

`envserver serve` with an engine that takes 5 to 15 seconds for a call, so that as many rollouts are
in flight at any time and do not end in waves; the engine and the workers are processes of their
own. From its second turn on an agent says `--more` words: 40 turns of 5,000 end with 200,000
tokens, and the engine is the simulated one, which takes token ids. Memory is the most that the
server alone held (RssAnon) until as many rollouts more had ended as are in flight: what it needs
for these is there then, and what comes later is growth. Lag is how late each of the loop's 50 ms
ticks came; other programs add to it. Exits with 1 where memory still grows at the end, by more than
a tenth over the last half of the run.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import compare_runs as runs
from api_load import Server, asked, judge, show, table
from support.commands import running

MOST_GROWTH = 0.1


def measured(server: Server, rollouts: int, step: int) -> list[list[float]]:
    """Rows of: rollouts so far, in flight, MB, CPU seconds, p99 of the lag in milliseconds."""
    rows: list[list[float]] = []
    most = lag = 0.0
    while not rows or rows[-1][0] < rollouts:
        time.sleep(1.0)
        done = server.metric("envserver_rollouts_total")
        most = max(most, server.megabytes())
        lag = max(lag, 1000 * server.metric("envserver_loop_lag_p99_seconds"))
        if done >= step * len(rows):
            rows.append(
                [done, server.metric("envserver_rollouts_running"), most, server.cpu(), lag]
            )
            print(*(f"{value:.1f}" for value in rows[-1]), file=sys.stderr, flush=True)
            most = lag = 0.0
    return rows


@contextmanager
def simulated(call_seconds: float, folder: Path) -> Iterator[str]:
    """The URL of an engine whose calls take about so long, by the lengths of its answers."""
    times = (
        "--sim.latency_seconds",
        call_seconds / 2,
        "--sim.seconds_per_token",
        call_seconds / 100,
    )
    words = ("models", "sim", "--port", 0, "--sim.context_tokens", 2**18, *times)
    with running(*words, folder=folder) as process:
        yield process.wait_for(r"(http://127\.0\.0\.1:\d+)")[1]


def main() -> None:
    words = asked(__doc__, rollouts=10_000, in_flight=1000, turns=1, more=0, call_seconds=10.0)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        if words.more:
            engine = stack.enter_context(simulated(words.call_seconds, Path(name)))
        else:
            engine = stack.enter_context(runs.engine(words.call_seconds, 0.5))
        settings = {
            "--openai.num_max_requests_at_once": 2 * words.in_flight,
            "--rollouts.max_queued_groups": 10**6,
            "--workers.rollouts_per_process": words.in_flight,
            "--port": 0,
            "--store": f"{name}/groups.db",
            "--log_level": "warning",
        }
        pairs = [word for pair in settings.items() for word in pair]
        work = runs.Work(words.rollouts, words.turns, words.in_flight, words.more)
        talk = runs.talking(runs.HERE / "compare_talk.py", engine, work)
        serve = ("-m", "envserver", "serve", *talk, *pairs)
        with running(*serve, folder=Path(name), program=Path(sys.executable)) as process:
            url = process.wait_for(r"(http://127\.0\.0\.1:\d+)")[1]
            rows = measured(Server("ours", url, process.pid), words.rollouts, words.in_flight)
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
