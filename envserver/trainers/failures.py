"""The latest failures of rollouts, and what was dropped and why; GET /v1/failures.

In: events of the server's own rollouts, reports of joined runners, groups that trainers set aside.
Out: the last 1,000 rows, newest first. What holds: a message is short, and has nothing in it that
looks like a secret, and no control characters.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Annotated, Any, Final, Literal

import msgspec
from envserver_records.errors import Fault, RolloutError, by_kind, fault_of
from fastapi import APIRouter, Query
from starlette.responses import Response

from ..http.answers import answers, json_answer
from ..rollouts.events import Event, GroupDropped, Observer, RolloutFailed
from ..settings.section import Described
from ..store import GroupRow
from ..telemetry.redaction import printable, redacted

What = Literal["attempt", "rollout", "group", "drop"]

MOST_ROWS: Final = 1000
_MOST_CHARACTERS: Final = 2000
_MOST_ALIKE: Final = 20
"""Rows for one request of a trainer."""
_LIMIT: Final = 2**63 - 1
_FAULTS_OF_DROPS: Final[Mapping[str, Fault]] = {
    "zero_variance": "model",
    "too_long": "model",
    "stale": "trainer",
    "unscorable": "environment",
    "untrained": "environment",
}
"""By reason. A group that lost too many rollouts is incomplete: see its latest failure."""
_KINDS: Final = by_kind(RolloutError)


class FailureRow(msgspec.Struct, frozen=True, kw_only=True):
    """A failure, or a group that was not delivered.

    Args:
        n: its number, from 1 since the server started.
        time: seconds since 1970.
        kind: of `envserver_records.errors`, or the reason of a drop.
        what: attempt: it is tried again; rollout: it is lost; group: not delivered, a failure;
            drop: not delivered, filtered or set aside.
        count: number of failures that it stands for; joined runners tell only how many.
        runner: name of the joined runner that told it.
    """

    n: int
    time: float
    environment: str
    task_id: str = ""
    group_id: str = ""
    rollout: int | None = None
    attempt: int | None = None
    kind: str
    fault: Fault
    message: str
    what: What
    count: int = 1
    runner: str | None = None


class FailuresAnswer(Described):
    failures: list[dict[str, Any]]
    """Newest first: `n`, `time`, `environment`, `task_id`, `group_id`, `rollout`, `attempt`,
    `kind`, `fault` (model, environment, engine, trainer, infrastructure), `message`, `what`
    (attempt: it is tried again; rollout: it is lost; group: not delivered; drop: filtered, stale or
    set aside), `count`, `runner`.
    """
    counts: dict[str, int]
    """By kind, over the last 1000 that match all filters but `kind` and `before`."""
    next: int | None
    """The `before` of the next page; null on the last one."""


class FailureLog:
    """The last 1,000 failures and drops of a server. `number`: of the latest."""

    def __init__(self) -> None:
        self.number = 0
        self._rows: deque[FailureRow] = deque(maxlen=MOST_ROWS)

    def observer(self, environment: str) -> Observer:
        """Returns an observer of the rollouts of `environment`."""
        return partial(self._observe, environment)

    def add(self, *, message: str, **facts: Any) -> None:
        """Adds a row; `facts`: the fields of `FailureRow` but `n`."""
        self.number += 1
        shown = redacted(printable(message[:_MOST_CHARACTERS], keep="\n"))
        self._rows.append(FailureRow(n=self.number, message=shown, **facts))

    def _observe(self, environment: str, event: Event) -> None:
        if isinstance(event, RolloutFailed):
            failure = event.failure
            self.add(
                time=event.at,
                environment=environment,
                task_id=event.task_id,
                group_id=event.group_id,
                rollout=_number(event.rollout_id),
                attempt=event.attempt,
                kind=failure.kind,
                fault=fault_of(failure.kind, failure.blame),
                message=failure.message,
                what="rollout" if event.final else "attempt",
            )
        elif isinstance(event, GroupDropped):
            self.add(
                time=event.at,
                environment=environment,
                task_id=event.task_id,
                group_id=event.group_id,
                kind=event.reason,
                fault=_FAULTS_OF_DROPS.get(event.reason) or self._fault_of_group(event.group_id),
                message=event.message,
                what="group" if event.failed else "drop",
            )

    def _fault_of_group(self, group_id: str) -> Fault:
        """Returns whose fault the latest failure of a group was."""
        latest = islice(reversed(self._rows), MOST_ROWS)
        return next((one.fault for one in latest if one.group_id == group_id), "environment")

    def told(
        self, environment: str, runner: str, failures: Mapping[str, int], drops: Mapping[str, int]
    ) -> None:
        """Adds how many attempts failed and groups were dropped at a joined runner since it told
        of them last, by kind and reason.
        """
        for counts, what, noun in ((failures, "attempt", "attempts"), (drops, "drop", "groups")):
            for kind, count in counts.items():
                known = _KINDS.get(kind, RolloutError)
                fault = fault_of(kind, known.blame)
                self.add(
                    time=time.time(),
                    environment=environment,
                    kind=kind,
                    fault=_FAULTS_OF_DROPS.get(kind, fault) if what == "drop" else fault,
                    message=f"{count} {noun} at the runner {runner}; its log says more.",
                    what=what,
                    count=count,
                    runner=runner,
                )

    def set_aside(self, groups: Sequence[GroupRow], reason: str) -> None:
        """Adds groups that a trainer cannot use."""
        for one in groups[:_MOST_ALIKE]:
            self.add(
                time=time.time(),
                environment=one.env,
                group_id=one.group_id,
                kind="set_aside",
                fault="trainer",
                message=reason,
                what="drop",
            )

    def dropped(self, kind: str, count: int, message: str, fault: Fault) -> None:
        """Adds groups that left the store, of which only the number is known."""
        self.add(
            time=time.time(),
            environment="",
            kind=kind,
            fault=fault,
            message=message,
            what="drop",
            count=count,
        )

    def after(self, number: int) -> list[FailureRow]:
        """Returns the rows after `number`, oldest first."""
        newest = islice(reversed(self._rows), max(0, self.number - number))
        return list(newest)[::-1]

    def page(
        self, *, environment: str, kind: str, fault: str, before: int, limit: int
    ) -> tuple[list[FailureRow], dict[str, int], int | None]:
        """Returns up to `limit` matching rows before number `before`, newest first; the counts by
        kind; and the `before` of the next page.
        """
        alike = [
            row
            for row in reversed(self._rows)
            if environment in ("", row.environment) and fault in ("", row.fault)
        ]
        counts = _counted(alike)
        wanted = [row for row in alike if row.n < before and kind in ("", row.kind)]
        shown = wanted[:limit]
        return shown, counts, shown[-1].n if len(wanted) > limit else None


def _counted(rows: Iterable[FailureRow]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for row in rows:
        counts[row.kind] += row.count
    return dict(counts.most_common())


def _number(rollout_id: str) -> int | None:
    """Returns the number of a rollout in its group."""
    number = rollout_id.rpartition("-r")[2]
    return int(number) if number.isdecimal() else None


def add_failure_routes(router: APIRouter, failures: FailureLog) -> None:
    @router.get("/v1/failures", responses=answers(FailuresAnswer, 422, what="Failures."))
    async def list_failures(
        environment: Annotated[str, Query(max_length=256)] = "",
        kind: Annotated[str, Query(max_length=256, description="kind, or reason of a drop")] = "",
        fault: Annotated[Fault | Literal[""], Query(description="whose fault")] = "",
        before: Annotated[
            int, Query(ge=0, le=_LIMIT, description="only those of a smaller `n`")
        ] = _LIMIT,
        limit: Annotated[int, Query(ge=1, le=MOST_ROWS)] = 100,
    ) -> Response:
        """Lists the last 1000 failures and drops since the server started, newest first: attempts
        that failed and rollouts that were lost, whose fault it was and in which words; groups that
        were not delivered, and why. Joined runners tell only how many.
        """
        rows, counts, following = failures.page(
            environment=environment, kind=kind, fault=fault, before=before, limit=limit
        )
        shown = [msgspec.structs.asdict(row) for row in rows]
        return json_answer({"failures": shown, "counts": counts, "next": following})
