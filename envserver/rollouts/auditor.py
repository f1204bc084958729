"""Re-scores a share of a server's rollouts in the background.

`offer` never waits: rollouts that do not fit in the queue are dropped and counted. The engine gets
one request at a time, so rollouts are hardly slowed; differences are logged as `audit_mismatch` and
counted in `report`. Whether a rollout is audited depends on its id alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, Self

import msgspec
import structlog
from envserver_records.errors import EngineError
from envserver_records.records import Trajectory

from ..models.engine import Engine
from ..proxy.gate import Aborted, Gate
from .audit import AuditedRow, AuditResult, Totals, audit_row, rows_of, share_of, why_not_comparable
from .rescoring import Rescorer

_log = structlog.get_logger("envserver.audit")

_MOST_WAITING: Final = 64
_LAST_SECONDS: Final = 10.0
"""Seconds to finish the queue at an orderly shutdown."""


class Auditor:
    """Audits a share of the rollouts offered to it; an async context manager.

    Args:
        engine: open for as long as the auditor works.
        fraction: share of the rollouts, in [0, 1].
        tolerance: largest |difference| of a logprob that counts as rounding.
        version: returns the policy version that the engine serves, -1 if versions are not counted.
        gate: pauses calls during weight updates; audits wait there, too.
        most_waiting: maximum rollouts in the queue.
    """

    def __init__(
        self,
        engine: Engine,
        fraction: float,
        tolerance: float,
        *,
        version: Callable[[], int] = lambda: -1,
        gate: Gate | None = None,
        most_waiting: int = _MOST_WAITING,
    ) -> None:
        self.fraction = fraction
        self._rescorer = Rescorer(engine)
        self._version = version
        self._gate = gate or Gate()
        self._queue: asyncio.Queue[Trajectory] = asyncio.Queue(most_waiting)
        self._totals = Totals(tolerance)
        self._rollouts = 0
        self._dropped = 0
        self._not_compared: Counter[str] = Counter()
        self._refused = 0
        self._errors: Counter[str] = Counter()
        self._work: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self.fraction > 0:
            self._work = asyncio.create_task(self._run(), name="audit")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if self._work is None:
            return
        if kind is None and not self._work.done():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._queue.join(), _LAST_SECONDS)
        self._work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._work

    def offer(self, trajectory: Trajectory) -> bool:
        """Queues `trajectory` if it is to be audited and there is room; returns whether it did."""
        if share_of(0, trajectory.rollout_id) >= self.fraction:
            return False
        try:
            self._queue.put_nowait(trajectory)
        except asyncio.QueueFull:
            self._dropped += 1
            return False
        return True

    def report(self) -> dict[str, Any]:
        """Returns the findings so far, JSON-like."""
        return {
            "fraction": self.fraction,
            "rollouts": self._rollouts,
            **self._totals.facts(),
            "rows_refused": self._refused,
            "rows_not_compared": dict(self._not_compared),
            "engine_failures": dict(self._errors),
            "rollouts_waiting": self._queue.qsize(),
            "rollouts_dropped": self._dropped,
        }

    def summary(self) -> str:
        """Returns the report in one line."""
        totals = self._totals
        words = [
            f"{totals.rows_over} of {totals.rows} rows differ",
            f"{totals.exact:,} of {totals.tokens:,} tokens are exactly equal",
            f"the largest difference is {totals.largest:.2g}",
        ]
        left_out = {
            "rows were not compared": self._not_compared.total(),
            "rows were refused": self._refused,
            "rows met a failing engine": self._errors.total(),
            "rollouts found no room": self._dropped + self._queue.qsize(),
        }
        words += [f"{count} {what}" for what, count in left_out.items() if count]
        return f"Audit: {', '.join(words)}."

    async def _run(self) -> None:
        while True:
            trajectory = await self._queue.get()
            for row in rows_of(trajectory, trajectory.images):
                await self._audit(row)
            self._rollouts += 1
            self._queue.task_done()

    async def _audit(self, row: AuditedRow) -> None:
        try:
            async with self._gate.passing():
                outcome = await self._outcome(row)
        except Aborted:
            self._not_compared["weights_changed"] += 1
        except EngineError as error:
            self._errors[error.kind] += 1
            _log.warning("audit_failed", rollout_id=row.rollout_id, error=str(error))
        else:
            self._count(row, outcome)

    async def _outcome(self, row: AuditedRow) -> AuditResult:
        version = self._version()
        if reason := why_not_comparable(row, version):
            return AuditResult(not_compared=reason)
        outcome = await audit_row(self._rescorer, row)
        if self._gate.paused or self._version() != version:
            return AuditResult(not_compared="weights_changed")
        return outcome

    def _count(self, row: AuditedRow, outcome: AuditResult) -> None:
        if outcome.refused:
            self._refused += 1
            _log.warning("audit_refused", rollout_id=row.rollout_id, message=outcome.refused)
        elif outcome.comparison is None:
            self._not_compared[outcome.not_compared] += 1
        elif not self._totals.add(outcome.comparison):
            worst = msgspec.structs.asdict(outcome.comparison.worst())
            facts = {name: value for name, value in worst.items() if value not in (None, "")}
            _log.warning("audit_mismatch", **facts)
