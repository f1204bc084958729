"""`envserver top`: what a running server does, as tables that are renewed."""

from __future__ import annotations

import time
from contextlib import suppress

import httpx
from envserver_records.errors import ConflictError, NotFoundError
from envserver_records.servers import ServersClient
from envserver_records.urls import authorization
from rich.live import Live

from ..telemetry.history import Name, Row
from .console import Console
from .overview import WINDOW, Overview
from .specs.top_command import COMMAND

_SECONDS = 20.0
_POINTS = 100


def run(argv: list[str]) -> int:
    """Shows the tables until Ctrl-C, or once."""
    settings = COMMAND.read(argv)
    console = Console()
    with ServersClient(settings.url, timeout=_SECONDS, headers=authorization()) as http:
        shown = _overview(http, settings.url).tables()
        if settings.once:
            console.print(shown)
            return 0
        with Live(shown, console=console, auto_refresh=False) as live:
            while True:
                time.sleep(settings.seconds)
                live.update(_overview(http, settings.url).tables(), refresh=True)


def _overview(http: httpx.Client, url: str) -> Overview:
    return Overview(_rows(http, url), _alarms(http))


def _alarms(http: httpx.Client) -> list[str]:
    """Returns what is wrong at the server; an older one does not know."""
    with suppress(httpx.TransportError):
        answer = http.get("/v1/alarms")
        if answer.is_success:
            return [one["text"] for one in answer.json()["alarms"]]
    return []


def _rows(http: httpx.Client, url: str) -> list[Row]:
    try:
        answer = http.get("/v1/series", params={"start": -WINDOW - 15, "points": _POINTS})
    except httpx.TransportError as error:
        raise NotFoundError(
            f"No server answers at {url}: {error or type(error).__name__}."
        ) from error
    if answer.status_code == httpx.codes.NOT_FOUND:
        raise NotFoundError(f"{url} has no curves.", hint="Is it an envserver of this version?")
    if not answer.is_success:
        raise ConflictError(
            f"{url} answered with HTTP {answer.status_code}: {answer.text[:300]}",
            hint="ENVSERVER_TOKEN holds the token." if answer.status_code in (401, 403) else "",
        )
    found = answer.json()
    names = [
        (Name(one["name"], tuple(sorted(one["labels"].items()))), one["values"])
        for one in found["series"]
    ]
    rows: list[Row] = [
        (at, {name: values[place] for name, values in names if values[place] is not None})
        for place, at in enumerate(found["times"])
    ]
    if not rows:
        raise ConflictError(f"{url} has no numbers of the last minute yet.", hint="Ask again.")
    return rows
