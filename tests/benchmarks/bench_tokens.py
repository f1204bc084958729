"""CPU seconds from a rollout's calls to its checked rows, against comparing every pair of calls.

    python tests/benchmarks/bench_tokens.py

Rollouts of many long calls, and the shapes that are worst for finding which call continues which.
The budgets hold `build` and `check` together, the lowest of a few runs; over one, it exits with 1,
as when finding the parents costs more than a fifth of comparing all pairs, over all rollouts.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from api_load import judge, show
from api_load import table as columned
from envserver_records.records import Call, pack
from support.forests import answers, comb, conversations

from envserver.tokens.builder import build, find_parents
from envserver.tokens.invariants import check
from envserver.tokens.trace import pack_calls

RUNS = 3
LEAST_GAIN = 5


class Case(NamedTuple):
    """`budget_seconds` is for `build` and `check` together."""

    name: str
    make: Callable[[], list[Call]]
    budget_seconds: float


CASES = [
    Case("conversation, 100 turns", lambda: conversations(100, 33_000), 0.1),
    Case("conversation, 800 turns", lambda: conversations(800, 65_000), 0.8),
    Case("8 sub-agents, 100 turns each", lambda: conversations(100, 33_000, side_by_side=8), 0.8),
    Case("1,000 samples of one prompt", lambda: answers(1000, 16_000), 1.5),
    Case("1,000 prompts that begin alike", lambda: answers(1000, 16_000, ends=1000), 1.5),
    Case("each of 500 turns answered twice", lambda: comb(500, 32_000), 2.0),
]


def pairwise_parents(calls: list[Call]) -> list[int]:
    """What `find_parents` gives, by comparing each call with every earlier one."""
    seen: list[bytes] = []
    parents = []
    for call in calls:
        prompt = call.prompt_ids.tobytes()
        matching = [
            (len(seen[j]), j)
            for j, other in enumerate(calls[: len(seen)])
            if other.completion_ids.size
            and (other.agent, other.model) == (call.agent, call.model)
            and prompt.startswith(seen[j])
        ]
        parents.append(max(matching)[1] if matching else -1)
        seen.append(prompt + call.completion_ids.tobytes())
    return parents


def cpu_seconds(work: Callable[[], object]) -> float:
    """The lowest of a few runs: what other programs add is not part of it."""
    seconds = []
    for _ in range(RUNS):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    return min(seconds)


def main() -> None:
    columns = ("rollout", "calls", "M tokens in", "rows", "M out", "parents", "pairwise", "build")
    table = columned(f"CPU seconds, lowest of {RUNS} runs", *columns, "check", "budget", "trace")
    missed, found, compared = [], 0.0, 0.0
    for case in CASES:
        calls = case.make()
        rows, parents = build(calls), find_parents(calls)
        assert parents == pairwise_parents(calls)
        building = cpu_seconds(lambda calls=calls: build(calls))
        checking = cpu_seconds(lambda calls=calls, rows=rows: check(calls, rows))
        finding = cpu_seconds(lambda calls=calls: find_parents(calls))
        comparing = cpu_seconds(lambda calls=calls: pairwise_parents(calls))
        found, compared = found + finding, compared + comparing
        if building + checking > case.budget_seconds:
            missed.append(case.name)
        table.add_row(
            case.name,
            f"{len(calls)}",
            f"{sum(len(call.prompt_ids) for call in calls) / 1e6:.1f}",
            f"{len(rows)}",
            f"{sum(len(row.tokens) for row in rows) / 1e6:.1f}",
            f"{finding:.3f}",
            f"{comparing:.3f}",
            f"{building:.3f}",
            f"{checking:.3f}",
            f"{case.budget_seconds:.1f}",
            f"{len(pack(pack_calls(calls, parents))) / len(pack(calls)):.1%}",
        )
    show(table)
    print("trace: its size, of that of the calls recorded whole.")
    print(f"Finding the parents is {compared / found:.0f} times cheaper than comparing all pairs.")
    if compared < LEAST_GAIN * found:
        missed.append("finding the parents")
    judge(missed)


if __name__ == "__main__":
    main()
