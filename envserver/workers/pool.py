"""The interface between the scheduler and whatever runs agents.

What a worker gets is the Assignment and what its url answers, nothing else; so a pool may run it
here, in a container or on another machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from ..environment import Isolation


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to run.

    Args:
        rollout_id: unique among the rollouts that run at the same time.
        url: of the attempt, with its key, without a slash at the end.
        isolation: "pooled": beside others in a warm process; "dedicated": in its own process;
            "sandboxed": that process also lives in a sandbox.
        deadline: `time.time()` at which the agent is cancelled.
        job: what the worker needs to run it (`run.Job`), as JSON.
        take_result: is given what the worker would post to `{url}/result`; it refuses nothing.
    """

    rollout_id: str
    url: str
    env_reference: str
    isolation: Isolation
    deadline: float
    job: bytes
    take_result: Callable[[bytes], None]


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """Resource usage of a process and the children it waited for. MB are 2**20 bytes."""

    cpu_seconds: float
    peak_memory_mb: float


class WorkerPool(Protocol):
    """Runs assignments concurrently up to its capacity; further ones wait."""

    async def run(self, assignment: Assignment) -> Spent | None:
        """Returns when the worker has posted what became of the attempt, and, where it ran in a
        process of its own, that one has ended: what it used, None where it shared one.

        Cancelling it cancels the agent; it ends only when the agent has, or its process is killed.
        """

    def workers(self) -> dict[str, int]:
        """Returns the process id of the worker of each rollout that runs."""

    def snapshot(self) -> dict[str, Any]:
        """Returns JSON-like facts for people: processes, rollouts, restarts and deaths by kind."""
