"""GET /v1/status, and what it leaves out: alarms, series, source, estimates, evaluations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Final, Literal

import msgspec
from envserver_records.records import Split
from fastapi import APIRouter, Query
from starlette.responses import Response

from ... import __version__
from ...settings.section import Described
from ...store import DamagedGroup, GroupStore
from ...store.groups import EstimateRow
from ...telemetry.alarms import AlarmBook
from ...telemetry.history import curves
from ..atropos.service import AtroposService
from ..recording import Recorder
from .answers import answers, json_answer
from .models import MOST_GROUPS, EstimatesAnswer, StatusAnswer
from .policy import PolicyVersion

_DAMAGED_SHOWN: Final = 20


def add_status_routes(
    router: APIRouter,
    store: GroupStore,
    atropos: AtroposService,
    policy: PolicyVersion,
    joined: Callable[[], dict[str, int]],
    status: Callable[[], dict[str, Any]] | None,
) -> None:
    async def damaged() -> list[DamagedGroup]:
        # The count is kept in memory; query the store only if it is not zero.
        return await store.damaged(_DAMAGED_SHOWN) if "damaged" in await store.counters() else []

    @router.get("/v1/status", responses=answers(StatusAnswer, what="The server's status."))
    async def get_status() -> Response:
        """Returns groups by state, what waits for each open run, the state of the Atropos
        protocol, and the server's counters.
        """
        return json_answer(
            {
                "version": __version__,
                "policy_version": policy.version,
                "groups": await store.counts(),
                "runs": {
                    name: msgspec.structs.asdict(backlog)
                    for name, backlog in (await store.backlogs()).items()
                },
                "damaged": [msgspec.structs.asdict(one) for one in await damaged()],
                "atropos": atropos.snapshot(),
                "joined": joined(),
                "server": status() if status is not None else {},
            }
        )


class AlarmsAnswer(Described):
    alarms: list[dict[str, Any]]
    """The active ones, critical ones first: `name`, `severity` (warning or critical), `text` (a
    sentence), `since` (seconds since 1970), `environment` (null: not of one), `link` (the page of
    the dashboard), `about` (the environment, agent or replica, or "").
    """
    checked_at: float
    """Seconds since 1970; 0: not yet."""


def add_alarm_routes(router: APIRouter, book: AlarmBook) -> None:
    @router.get("/v1/alarms", responses=answers(AlarmsAnswer, what="The active alarms."))
    async def alarms() -> Response:
        """Returns what is wrong now. It is checked every ten seconds."""
        listed = [one.facts() for one in book.active]
        return json_answer({"alarms": listed, "checked_at": book.checked_at})


_MOST_POINTS: Final = 2000


class SeriesAnswer(Described):
    times: list[float]
    """Seconds since 1970."""
    series: list[dict[str, Any]]
    """`name` and `labels` as in `/metrics`, and `values`, one for each time (null: there was none).
    Counters begin at 0 again when the server starts.
    """


def add_series_routes(router: APIRouter, recorder: Recorder) -> None:
    @router.get("/v1/series", responses=answers(SeriesAnswer, 422, what="Curves."))
    async def series(
        names: Annotated[
            str, Query(max_length=4096, description="names of samples, by commas; empty: all")
        ] = "",
        start: Annotated[
            float,
            Query(ge=-1e11, le=1e11, description="seconds since 1970; negative: before `end`"),
        ] = -3600,
        end: Annotated[
            float | None,
            Query(ge=0, le=1e11, description="seconds since 1970; unset: now"),
        ] = None,
        points: Annotated[
            int, Query(ge=1, le=_MOST_POINTS, description="maximum number of times")
        ] = 300,
    ) -> Response:
        """Returns some numbers of `/metrics` over time: each ten seconds of the last two hours,
        each minute of the last thirty days. Without parameters, all numbers of the last hour.
        """
        last = time.time() if end is None else end
        first = start if start >= 0 else last + start
        rows = await recorder.between(first, last, points)
        wanted = frozenset(filter(None, (name.strip() for name in names.split(","))))
        # Of many names, this takes a tenth of a second: not on the event loop.
        return json_answer(await asyncio.to_thread(curves, rows, points, wanted))


_PARTS: Final = ("overview", "groups", "tasks", "runs", "workers", "failures", "alarms")
_OF_ROLLOUTS: Final = ("engines",)
_OF_EVALUATIONS: Final = ("held_out",)
_MOST_NAMED: Final = 3


class SourceAnswer(Described):
    kind: Literal["server", "file", "folder", "store", "evaluation", "comparison"]
    title: str
    """Its title: the environments, or the name of a file."""
    live: bool
    """Whether there is more to come, told by `/v1/events`."""
    parts: list[str]
    """Pages that have something to show."""
    version: str
    """Version of envserver."""
    replay_source: str | None
    """The SOURCE for `envserver replay`; null: this server's own address."""


def add_source_routes(
    router: APIRouter,
    names: Callable[[], Iterable[str]],
    *,
    makes_rollouts: bool,
    evaluated: Callable[[], bool],
) -> None:
    """Adds the route.

    Args:
        names: returns the names of the environments.
        makes_rollouts: whether this server has an engine and makes rollouts itself.
        evaluated: returns whether there are evaluations of held-out tasks.
    """

    @router.get("/v1/source", responses=answers(SourceAnswer, what="What can be looked at."))
    async def source() -> Response:
        """Returns what this server shows: the page has a menu of these parts."""
        return json_answer(
            {
                "kind": "server",
                "title": _title(sorted(names())),
                "live": True,
                "parts": [
                    *_PARTS,
                    *(_OF_ROLLOUTS if makes_rollouts else ()),
                    *(_OF_EVALUATIONS if evaluated() else ()),
                ],
                "version": __version__,
                "replay_source": None,
            }
        )


def _title(names: list[str]) -> str:
    if not names:
        return "envserver"
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


_NUMBER_LIMIT = 2**63 - 1


def add_estimate_routes(router: APIRouter, store: GroupStore) -> None:
    @router.get(
        "/v1/tasks/estimates",
        responses=answers(EstimatesAnswer, 422, what="A page of estimates."),
    )
    async def list_estimates(
        after: Annotated[
            int, Query(ge=0, le=_NUMBER_LIMIT, description="`number` of the last estimate seen")
        ] = 0,
        limit: Annotated[
            int, Query(ge=1, le=MOST_GROUPS, description="maximum number of estimates")
        ] = 100,
        environment: Annotated[
            str | None,
            Query(max_length=256, pattern=r"^[^\x00]*$", description="only this environment"),
        ] = None,
        split: Annotated[Split | None, Query(description="only this split")] = None,
    ) -> Response:
        """Lists how often the policy solves each task that was ever scored. Stored groups count,
        and so do groups dropped for their rewards or their age; evaluations do not. Tasks come in
        the order in which they were first scored; `next` is the `after` of the following page, null
        on the last page.
        """
        rows = await store.task_estimates(after, limit, env=environment, split=split)
        following = rows[-1].number if len(rows) == limit else None
        return json_answer({"estimates": [_shown(row) for row in rows], "next": following})


def _shown(row: EstimateRow) -> dict[str, Any]:
    estimate = row.estimate
    return {
        "number": row.number,
        "task_id": row.task_id,
        "environment": row.env,
        "split": row.split,
        "attempts": estimate.attempts,
        "mean_reward": estimate.mean_reward,
        "success": estimate.success,
        "weight": estimate.weight,
        "policy_version": estimate.policy_version,
        "scored_at": row.scored_at,
    }
