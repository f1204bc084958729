"""Adapts the number of calls in flight at a replica to its load. Pure.

A call that waits inside an engine holds memory there and may be preempted and repeated; a call that
waits here may still go to another replica. So the limit grows by a step while the engine works on
all its calls and more want to go there, and shrinks by a share when calls wait in the engine or are
preempted (additive increase, multiplicative decrease).
"""

from __future__ import annotations

import re

import msgspec

FLOOR = 4
"""Minimum limit, so that the engine keeps reporting its load."""

_SHRINK = 0.85
_QUEUED_POLLS = 2
"""Polls in a row that must show a queue: calls that have just arrived wait, too."""
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
    """The load that an engine reports, over all its schedulers.

    Args:
        running, waiting: number of requests, from any client.
        preempted: requests stopped for lack of memory since its start.
        cache: share of the KV cache in use, 0 to 1.
    """

    running: float
    waiting: float
    preempted: float = 0.0
    cache: float = 0.0


def read_load(text: str) -> Load | None:
    """Reads vLLM's or SGLang's load from Prometheus text; None if it is missing.

    A regular expression instead of a full parser, since only a few of some hundred lines matter and
    they are read every second.
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
    """The limit of one replica: from min(FLOOR, most) to `most`, where it starts."""

    def __init__(self, most: int) -> None:
        self.limit = most
        self._most = most
        self._floor = min(FLOOR, most)
        self._step = max(1, most // 64)
        self._queued_polls = 0
        self._preempted: float | None = None

    def observe(self, load: Load, in_flight: int) -> int:
        """Updates and returns the limit, given the load and our calls in flight at one poll."""
        preempted = self._preempted is not None and load.preempted > self._preempted
        self._preempted = load.preempted
        self._queued_polls = self._queued_polls + 1 if load.waiting else 0
        if preempted or self._queued_polls >= _QUEUED_POLLS:
            # Calls in flight are never stopped: wait until the last step has taken effect. If
            # hardly any
            # calls are ours, other clients cause the queue.
            if self._floor <= in_flight <= self.limit:
                crowd = max(in_flight, self.limit // 2)
                self.limit = max(self._floor, int(_SHRINK * crowd))
                self._queued_polls = 0
        elif not load.waiting and in_flight >= self.limit and load.cache < _FULL:
            self.limit = min(self._most, self.limit + self._step)
        return self.limit

    def forget(self) -> int:
        """Resets the limit to its maximum, for an engine that reports no load."""
        self.limit, self._queued_polls, self._preempted = self._most, 0, None
        return self.limit
