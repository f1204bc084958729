"""GET /v1/series: the server's numbers over time."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query
from starlette.responses import Response

from ...described import Described
from ...telemetry.history import curves
from ..recording import Recorder
from .answers import answers, json_answer

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
