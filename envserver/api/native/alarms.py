"""GET /v1/alarms: what is wrong with the server, in words."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from ...described import Described
from ...telemetry.alarms import AlarmBook
from .answers import answers, json_answer


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
