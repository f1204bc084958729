"""Decides which rollouts of a worker that ended get which error. Pure functions.

A single rollout in the process gets the error. Of several, the known culprits get it and the others
are marked as `mate` in the error's detail. If no culprit is known, all are marked as `mate` and
`suspect`: each of them runs alone next time, so that a second death leaves no doubt.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from envserver_records.errors import WorkerDied, WorkerError

EXIT_CRASHED = 70
"""Exit code of a worker whose own code (not an agent's) raised."""


@dataclass(frozen=True)
class KillReason:
    """Why the server killed a worker. `culprits`: the rollouts at fault; empty if unknown."""

    kind: type[WorkerError]
    message: str
    culprits: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ProcessEnd:
    """How a process ended.

    Args:
        status: from `waitpid`; None: its exit was not observed.
        output: the end of what it printed; without a status, the reason.
        out_of_memory: the kernel killed some process for lack of memory while it lived, and it
            held no more than `workers.memory_mb` itself.
        cpu_seconds, peak_memory_mb: usage of the process and the children that it waited for.
    """

    status: int | None
    output: str = ""
    out_of_memory: bool = False
    cpu_seconds: float = 0.0
    peak_memory_mb: float = 0.0


def errors_by_rollout(
    rollout_ids: Iterable[str], end: ProcessEnd, reason: KillReason | None
) -> dict[str, WorkerError]:
    """Returns the error of every rollout that was running in a process that is gone."""
    running = list(rollout_ids)
    words, detail = describe(end)
    if reason is None:
        reason = KillReason(WorkerDied, f"The worker {words}.")
    else:
        detail.pop("signal", None)  # the server sent it
    alone = len(running) == 1
    errors: dict[str, WorkerError] = {}
    for rollout_id in running:
        if rollout_id in reason.culprits or (not reason.culprits and alone):
            errors[rollout_id] = reason.kind(reason.message, **detail)
        elif not reason.culprits:
            errors[rollout_id] = reason.kind(reason.message, mate=True, suspect=True, **detail)
        else:
            message = "The worker was killed because of another rollout in it."
            errors[rollout_id] = WorkerDied(message, mate=True)
    return errors


def describe(end: ProcessEnd) -> tuple[str, dict[str, Any]]:
    """Describes an end as text that follows "the worker", and as facts for the error."""
    detail: dict[str, Any] = {"output": end.output} if end.output else {}
    if end.status is None:
        return f"is gone: {end.output}", {}
    code = os.waitstatus_to_exitcode(end.status)
    if code >= 0:
        return f"exited with code {code}", {"exit_code": code, **detail}
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    words = f"was killed by {name}"
    if end.out_of_memory and -code == signal.SIGKILL:
        words += ", while the kernel killed processes for lack of memory"
        detail["out_of_memory"] = True
    return words, {"signal": name, **detail}
