"""What a long conversation costs the proxy: CPU of a call and memory of a rollout, by turn.

    python tests/benchmarks/bench_long.py [--turns 180] [--conversations 4] [--new_tokens 1100]

Conversations with tools go on side by side; each turn adds a result of so many tokens and an answer
of 64. The engine answers at once. CPU is that of the proxy alone for each call of the last ten
turns; memory is what the proxy holds (RssAnon) beyond what it held before the first call, for each
conversation. Exits with 1 over a budget.
"""

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parent.parent))
import proxy_calls as calls
from api_load import asked, judge, megabytes, show, table
from bench_proxy import House, choose_cores
from proxy_load import agents, by_turns, cpu_seconds, pin

WINDOW = 10
CPU_BUDGET_MS = (5.0, 0.12)
MEMORY_BUDGET_MB = (5.0, 0.1)
"""Of a call, and of a conversation: for itself, and for each 1,000 tokens; half as much again as it
takes on two busy cores of a virtual machine."""


async def measured(
    house: House, engine: str, words: argparse.Namespace
) -> list[tuple[int, float, float]]:
    """Rows of: turn, CPU milliseconds of a call, megabytes of a conversation."""
    turns, count, new = words.turns, words.conversations, words.new_tokens
    bodies = calls.requests(1000, turns, tools=True, streamed=False, new_tokens=new)
    pid = house.pid("tokens", engine)
    rows = []
    async with agents(house.urls("tokens", engine, 1), bodies[:2]) as some:
        await by_turns(some, range(2))
    before = megabytes("Private_", pid)
    async with agents(house.urls("tokens", engine, count), bodies) as some:
        for start in range(0, turns, WINDOW):
            used = cpu_seconds(pid)
            window = range(start, min(start + WINDOW, turns))
            done = await by_turns(some, window)
            cpu = 1000 * (cpu_seconds(pid) - used) / done.asked
            rows.append((window.stop, cpu, (megabytes("Private_", pid) - before) / count))
    return rows


def main() -> None:
    words = asked(__doc__, turns=180, conversations=4, new_tokens=1100)
    cores, missed = choose_cores(), []
    shown = table("A long conversation", "turns", "tokens", "CPU ms a call", "MB", left=0)
    with ExitStack() as stack:
        house = House(stack, cores)
        engine, _ = house.start_engine()
        house.start(["tokens"], engine)
        pin(cores.load)
        rows = uvloop.run(measured(house, engine, words))
    for turn, cpu, memory in rows:
        tokens = 1000 + turn * (words.new_tokens + calls.ANSWER_TOKENS)
        shown.add_row(str(turn), f"{tokens:,}", f"{cpu:.1f}", f"{memory:.1f}")
        for what, value, (base, each) in (
            ("ms", cpu, CPU_BUDGET_MS),
            ("MB", memory, MEMORY_BUDGET_MB),
        ):
            if value > base + each * tokens / 1000:
                missed.append(f"{value:.1f} {what} at {tokens:,} tokens")
    show(shown)
    judge(missed)


if __name__ == "__main__":
    main()
