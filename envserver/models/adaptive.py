"""How many calls a replica should have in flight, from what it says of itself. Pure.

A call that waits inside an engine holds memory there, is preempted and done again; one that waits
here may still go to another replica. So the number grows by a step while the engine works on all
that it has and more calls want to go there, and shrinks by a share when calls wait in the engine or
are preempted (additive increase, multiplicative decrease).
"""

from __future__ import annotations

import re

import msgspec

FLOOR = 4
"""Never fewer, so that the engine's answers go on telling how it does."""

_SHRINK = 0.85
_QUEUED_POLLS = 2
"""A queue that stands for so many polls in a row is one: calls that have just arrived wait too."""
_FULL = 0.95

_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_PREEMPTED = ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total")
_CACHE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_LINE = re.compile(
    rf"^({'|'.join((*_RUNNING, *_WAITING, *_PREEMPTED, *_CACHE))})(?:\{{.*\}})? +(\S+)",
    re.MULTILINE,
)


class Load(msgspec.Struct, frozen=True):
    """What an engine says of itself, over all of its schedulers.

    Args:
        running, waiting: requests, whoever sent them.
        preempted: requests so far that were stopped for lack of memory; counts from its start.
        cache: share of the memory for keys and values that is in use, 0 to 1.
    """

    running: float
    waiting: float
    preempted: float = 0.0
    cache: float = 0.0


def read_load(text: str) -> Load | None:
    """The load in Prometheus' text format, by vLLM's or SGLang's names; None if it is not there.

    Only a few lines of some hundred matter, and they are wanted every second: no parser reads all.
    """
    found: dict[str, list[float]] = {}
    for name, value in _LINE.findall(text):
        try:
            number = float(value)
        except ValueError:
            return None
        if not 0 <= number < float("inf"):
            return None
        found.setdefault(name, []).append(number)
    running, waiting = _first(found, _RUNNING), _first(found, _WAITING)
    if not running or not waiting:
        return None
    return Load(
        running=sum(running),
        waiting=sum(waiting),
        preempted=sum(_first(found, _PREEMPTED)),
        cache=max(_first(found, _CACHE), default=0.0),
    )


def _first(found: dict[str, list[float]], names: tuple[str, ...]) -> list[float]:
    return next((found[name] for name in names if name in found), [])


class AdaptiveLimit:
    """The number for one replica: `limit`, from min(FLOOR, most) to `most`, where it begins."""

    def __init__(self, most: int) -> None:
        self.limit = most
        self._most = most
        self._floor = min(FLOOR, most)
        self._step = max(1, most // 64)
        self._queued_polls = 0
        self._preempted: float | None = None

    def observe(self, load: Load, in_flight: int) -> int:
        """The new limit, given the load at one poll and our own calls in flight then."""
        preempted = self._preempted is not None and load.preempted > self._preempted
        self._preempted = load.preempted
        self._queued_polls = self._queued_polls + 1 if load.waiting else 0
        if preempted or self._queued_polls >= _QUEUED_POLLS:
            # Calls in flight are never ended: until they are fewer, the last step is not in force.
            # With hardly any of ours there, it is others who make the engine's calls wait.
            if self._floor <= in_flight <= self.limit:
                crowd = max(in_flight, self.limit // 2)
                self.limit = max(self._floor, int(_SHRINK * crowd))
                self._queued_polls = 0
        elif not load.waiting and in_flight >= self.limit and load.cache < _FULL:
            self.limit = min(self._most, self.limit + self._step)
        return self.limit

    def forget(self) -> int:
        """The limit where an engine says nothing of itself: the most."""
        self.limit, self._queued_polls, self._preempted = self._most, 0, None
        return self.limit
