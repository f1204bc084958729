"""A store with the numbers of a day, as if a server had run: for the page's charts."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from envserver.store import open_store
from envserver.telemetry.history import Name, as_json

_SPEED = {"math": 6, "code": 4, "video": 2}
"""Groups a minute of each environment."""
_SIZE = 8


def put_history(path: Path, hours: float) -> None:
    """Puts the minutes of the last `hours` into a new store.

    The server starts anew after half of the time; see `rows`.
    """
    with ThreadPoolExecutor(1) as thread:  # this one may have the event loop of a browser
        thread.submit(asyncio.run, _put_history(path, hours)).result()


async def _put_history(path: Path, hours: float) -> None:
    now = int(time.time() // 60)
    minutes = int(hours * 60)
    async with open_store(str(path)) as store:
        for number, numbers in enumerate(rows(minutes)):
            await store.put_minute(now - minutes + number, as_json(numbers), 0)


def rows(minutes: int, bad_minutes: int = 6) -> Iterator[dict[Name, float]]:
    """Yields the numbers of each minute. In the last `bad_minutes` the reward falls, calls fail."""
    rng = random.Random(0)
    counts: Counter[Name] = Counter()
    for minute in range(minutes):
        if minute == minutes // 2:
            counts.clear()
        done, falls = minute / minutes, minute > minutes - bad_minutes
        for environment, speed in _SPEED.items():
            _environment(counts, rng, environment, speed, done, falls)
        _count(counts, "engine_seconds_sum", 240 * (0.8 + done), path="/v1/chat/completions")
        _count(counts, "engine_seconds_count", 240, path="/v1/chat/completions")
        _count(counts, "engine_errors_total", rng.randrange(3) + 30 * falls, kind="unavailable")
        _count(counts, "staleness_versions_sum", 12 * rng.random() * 3)
        _count(counts, "staleness_versions_count", 12)
        for end in ("leased", "acked"):
            _count(counts, "leases_total", 6, end=end)
        counts[_name("process_cpu_seconds_total", prefix="")] += 20
        yield dict(counts) | _gauges(rng, minute, done)


def _environment(
    counts: Counter[Name], rng: random.Random, name: str, speed: int, done: float, falls: bool
) -> None:
    of = {"environment": name}
    share = {"math": 0.35 + 0.4 * done, "code": 0.2 + 0.4 * done, "video": 0.5}[name]
    share = 0.05 if falls and name == "code" else share
    rollouts = speed * _SIZE
    solved = sum(rng.random() < share for _ in range(rollouts))
    lost = rng.random() < 0.15
    _count(counts, "rollouts_total", rollouts - 2, end="scored", **of)
    _count(counts, "rollouts_total", 2 * (1 - done), end="limit_tokens", **of)
    _count(counts, "rollouts_total", lost, end="lost", **of)
    _count(counts, "failed_attempts_total", lost, kind="engine_unavailable", **of)
    _count(counts, "failed_attempts_total", 9 * falls, kind="engine_unavailable", **of)
    _count(counts, "reward_sum", solved, agent="", **of)
    _count(counts, "reward_count", rollouts, agent="", **of)
    _count(counts, "group_deviation_sum", speed * math.sqrt(share * (1 - share)), **of)
    _count(counts, "group_deviation_count", speed, **of)
    _count(counts, "groups_equal_total", rng.random() < share, **of)
    _count(counts, "groups_delivered_total", speed, **of)
    _count(counts, "stored_groups_total", speed, **of)
    _count(counts, "stored_reward_sum", solved, **of)
    _count(counts, "stored_reward_count", rollouts, **of)
    _count(counts, "groups_dropped_total", rng.random() < 0.3, reason="zero_variance", **of)
    _count(counts, "rollout_turns_sum", rollouts * (1 if name == "code" else 3), **of)
    _count(counts, "rollout_turns_count", rollouts, **of)
    _count(counts, "rollout_seconds_sum", rollouts * (4 + 3 * rng.random()), **of)
    _count(counts, "rollout_seconds_count", rollouts, **of)
    _count(counts, "tokens_total", rollouts * (300 + 250 * done), kind="completion", **of)
    _count(counts, "tokens_total", rollouts * 900, kind="prompt", **of)


def _gauges(rng: random.Random, minute: int, done: float) -> dict[Name, float]:
    found = {
        _name("policy_version"): float(minute // 15),
        _name("queue_depth", run="trainer"): 10 + 6 * math.sin(minute / 9),
        _name("engine_calls"): 20.0 + rng.randrange(10),
        _name("replica_calls", replica="http://a:8000/v1"): 12.0 + rng.randrange(6),
        _name("replica_calls", replica="http://b:8000/v1"): 10.0 + rng.randrange(6),
        _name("loop_lag_p99_seconds"): 0.004 + 0.004 * rng.random(),
        _name("process_resident_memory_bytes", prefix=""): 3e8 + 5e7 * done,
    }
    for state, value in (("queued", 12), ("leased", 4)):
        found[_name("groups", state=state)] = value + rng.randrange(5)
    for environment in _SPEED:
        found[_name("workers", environment=environment)] = 2.0
        found[_name("rollouts_running", environment=environment)] = 16.0 + rng.randrange(8)
        found[_name("sandboxes", environment=environment)] = float(environment == "code") * 9
        found[_name("tasks_solved_share", environment=environment)] = 0.3 + 0.4 * done
        found[_name("untrained_share", environment=environment)] = 0.01
    return found


def _count(counts: Counter[Name], name: str, by: float, **labels: str) -> None:
    counts[_name(name, **labels)] += by  # type: ignore[assignment]  # counters hold floats, too


def _name(name: str, prefix: str = "envserver_", **labels: str) -> Name:
    return Name(prefix + name, tuple(sorted(labels.items())))
