"""Pure functions: how a worker ended -> which of its rollouts gets which error.

One rollout in the process: the death is its own. Several: those known to be the cause get the error
and the rest are their mates; if none is, all are suspects, marked as mates too, and each next
runs in a process of its own, where a second death leaves no doubt.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from envserver_records.errors import WorkerDied, WorkerError


@dataclass(frozen=True)
class Verdict:
    """Why the server had a worker killed. `culprits`: the rollouts at fault, none where unknown."""

    kind: type[WorkerError]
    message: str
    culprits: frozenset[str] = frozenset()


@dataclass(frozen=True)
class End:
    """How a process ended.

    Args:
        status: from `waitpid`; None: nobody saw it.
        output: the last that it printed; without a status, the reason.
        out_of_memory: the kernel killed something for lack of memory while it lived.
        cpu_seconds, peak_memory_mb: of the process and all that it waited for.
    """

    status: int | None
    output: str = ""
    out_of_memory: bool = False
    cpu_seconds: float = 0.0
    peak_memory_mb: float = 0.0


def errors_by_rollout(
    rollout_ids: Iterable[str], end: End, verdict: Verdict | None
) -> dict[str, WorkerError]:
    """The error of every rollout that was running in a process that is gone."""
    running = list(rollout_ids)
    words, detail = describe(end)
    if verdict is None:
        verdict = Verdict(WorkerDied, f"The worker {words}.")
    else:
        detail.pop("signal", None)  # it was ours
    alone = len(running) == 1
    errors: dict[str, WorkerError] = {}
    for rollout_id in running:
        if rollout_id in verdict.culprits or (not verdict.culprits and alone):
            errors[rollout_id] = verdict.kind(verdict.message, **detail)
        elif not verdict.culprits:
            errors[rollout_id] = verdict.kind(verdict.message, mate=True, suspect=True, **detail)
        else:
            message = "The worker was killed because of another rollout in it."
            errors[rollout_id] = WorkerDied(message, mate=True)
    return errors


def describe(end: End) -> tuple[str, dict[str, Any]]:
    """In words that follow "the worker", and as small facts."""
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
