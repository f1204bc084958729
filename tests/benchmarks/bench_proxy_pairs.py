"""Compares the rate of a real engine behind our proxy with its own: paired runs, an interval.

    python tests/benchmarks/bench_proxy_pairs.py URL [--at 64] [--pairs 8] [--answer-tokens 256]

The engine is asked directly and through the proxy in turns, the first of each pair by turns too;
agents want exact tokens and logprobs both ways. Out: a JSON line for whole and one for streamed
answers: the mean ratio of the rates, its 95 % interval by Student's t, and the proxy's CPU. The
machine should do nothing else.
"""

import json
import math
import statistics
import sys
from contextlib import ExitStack
from typing import Any

import api_load as load
import proxy_calls as calls
import uvloop
from bench_proxy import Cost, House, choose_cores, model_of, with_time
from proxy_load import pin

T_95 = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
T_95 |= {11: 2.201, 15: 2.131}
"""Quantiles of Student's t for so many degrees of freedom."""


async def pairs(house: House, root: str, asked: Any, model: str, streamed: bool) -> None:
    ask = {"model": model, "max_tokens": asked.answer_tokens, "ignore_eos": True}
    shared = {"tools": False, "streamed": streamed, **ask}
    usage = calls.USAGE if streamed else {}
    bodies = {
        "engine": calls.requests(asked.prompt_tokens, 1, **{**calls.EXACT, **usage, **shared}),
        "auto": calls.requests(asked.prompt_tokens, 1, **shared),
    }
    runs: dict[str, list[Cost]] = {name: [] for name in bodies}
    for number in range(asked.pairs + 1):  # the first one warms up, the engine before the proxy
        for name in sorted(bodies, reverse=number % 2 == 0):
            one = await with_time(house, name, root, bodies[name], asked.at, asked.calls_each)
            if number:
                runs[name].append(one)
                print(f"{number} {name}: {one.measured.rate:.2f} calls a second", file=sys.stderr)
    rates = {name: [one.measured.rate for one in some] for name, some in runs.items()}
    ratios = [ours / alone for ours, alone in zip(rates["auto"], rates["engine"], strict=True)]
    quantile = T_95[max(known for known in T_95 if known <= len(ratios) - 1)]
    half = quantile * statistics.stdev(ratios) / math.sqrt(len(ratios))
    mean = statistics.fmean(ratios)
    told = {
        "answers": "streamed" if streamed else "whole",
        "in_flight": asked.at,
        "answer_tokens": asked.answer_tokens,
        "kept": round(mean, 4),
        "kept_95": [round(mean - half, 4), round(mean + half, 4)],
        "tokens_per_second": {
            name: round(statistics.fmean(some) * asked.answer_tokens)
            for name, some in rates.items()
        },
    }
    print(json.dumps(told), flush=True)


def main() -> None:
    asked = load.asked(
        __doc__, "url", at=64, pairs=8, answer_tokens=256, prompt_tokens=200, calls_each=3.0,
        kinds=["whole", "streamed"],
    )  # fmt: skip
    root = asked.url.rstrip("/").removesuffix("/v1")
    cores = choose_cores()
    with ExitStack() as stack:
        house = House(stack, cores)
        house.start(["auto"], root)
        pin(cores.load)
        model = model_of(root)
        for kind in asked.kinds:
            uvloop.run(pairs(house, root, asked, model, kind == "streamed"))


if __name__ == "__main__":
    main()
