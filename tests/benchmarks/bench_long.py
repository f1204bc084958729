"""What a long conversation costs the proxy: CPU of a call and memory of a rollout, by turn.

    python tests/benchmarks/bench_long.py [--turns 180] [--conversations 4] [--new_tokens 1100]

Conversations with tools go on side by side; each turn adds a result of so many tokens and an answer
of 64. The engine answers at once. CPU is that of the proxy alone for each call of the last ten
turns; memory is what the proxy holds a second after them, beyond what it held before the first
call, for each conversation. Exits with 1 where memory grows faster than the conversation does.
"""

import asyncio
from contextlib import ExitStack
from typing import Any

import proxy_calls as calls
import uvloop
from api_load import asked, judge, megabytes, show, table
from bench_proxy import House, choose_cores
from proxy_load import agents, by_turns, cpu_seconds

WINDOW = 10


async def measured(house: House, engine: str, words: Any) -> list[Any]:
    """Rows of: turn, CPU milliseconds of a call, megabytes of a conversation."""
    new = words.new_tokens
    bodies = calls.requests(1000, words.turns, tools=True, streamed=False, new_tokens=new)
    pid, rows = house.pid("tokens", engine), []
    async with agents(house.urls("tokens", engine, 1), bodies[:2]) as some:
        await by_turns(some, range(2))
    before = megabytes("Private_", pid)
    async with agents(house.urls("tokens", engine, words.conversations), bodies) as some:
        for end in range(WINDOW, words.turns + 1, WINDOW):
            used = cpu_seconds(pid)
            done = await by_turns(some, range(end - WINDOW, end))
            cpu = 1000 * (cpu_seconds(pid) - used) / done.asked
            await asyncio.sleep(1.5)
            rows.append((end, cpu, (megabytes("Private_", pid) - before) / words.conversations))
    return rows


def main() -> None:
    words = asked(__doc__, turns=180, conversations=4, new_tokens=1100)
    shown = table("A long conversation", "turns", "tokens", "CPU ms a call", "MB", left=0)
    with ExitStack() as stack:
        house = House(stack, choose_cores())
        engine, _ = house.start_engine()
        house.start(["tokens"], engine)
        rows = uvloop.run(measured(house, engine, words))
    for turn, cpu, memory in rows:
        tokens = 1000 + turn * (words.new_tokens + calls.ANSWER_TOKENS)
        shown.add_row(str(turn), f"{tokens:,}", f"{cpu:.1f}", f"{memory:.1f}")
    show(shown)
    # The last is twice as long as the first of these.
    judge(["memory"] if rows[-1][2] > 3 * rows[len(rows) // 2 - 1][2] else [])


if __name__ == "__main__":
    main()
