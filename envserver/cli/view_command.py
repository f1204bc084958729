"""Commands that look at runs: `view` serves a page, `top` shows tables of a running server."""

from __future__ import annotations

import time
import webbrowser
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from envserver_records.errors import UsageError
from envserver_records.http_errors import authorization
from pydantic import Field

from ..settings.config import Logged, LogLevel
from ..settings.section import Port, Section
from . import lean_imports
from .command_line import CommandSpec

if TYPE_CHECKING:
    from ..running.viewing import Viewing


class ViewSettings(Logged):
    source: list[str] = Field(default_factory=list)
    """Files of `process` (.jsonl, .gz, .zst), unified trajectories or traces; folders of them or of
    `evaluate`; a store; or a server's URL (ENVSERVER_TOKEN holds its token). Several: compared."""
    port: Port = 0
    """Port of the page; 0 picks a free one."""
    host: str = "127.0.0.1"
    """Address to listen on, of this machine only; from other machines use an SSH tunnel."""
    open: bool = False
    """Open the page in the browser."""
    log_level: LogLevel = "warning"


COMMAND = CommandSpec(
    "view",
    "Shows groups and rollouts in the browser: files, folders, evaluations, a store or a server.",
    ViewSettings,
    usage="FILE | FOLDER | STORE | URL ...",
    arguments=("source",),
)


def run(argv: list[str]) -> int:
    with lean_imports():
        from ..running.viewing import viewing
        from .loop import run_loop, show_logs

    settings = COMMAND.read(argv)
    if not settings.source:
        raise UsageError("`envserver view` needs something to show.", hint="Give a file.")
    show_logs(settings)
    return run_loop(
        _view(viewing(settings.source, host=settings.host, port=settings.port), settings.open)
    )


async def _view(viewing: AbstractAsyncContextManager[Viewing], opens_browser: bool) -> int:
    import asyncio

    from .console import Console
    from .loop import off_signals, stopped

    async with viewing as found:
        stop = stopped()
        Console().say(f"{found.title}: {found.url}/")
        if opens_browser:
            await asyncio.to_thread(webbrowser.open, f"{found.url}/")
        await stop.wait()
        off_signals()  # a second one does not wait for what is being read
    return 0


class TopSettings(Section):
    url: str = "http://127.0.0.1:8000"
    """Address of the server; several equal servers: separate with commas. ENVSERVER_TOKEN holds the
    access token, if it needs one."""
    seconds: float = Field(5.0, ge=0.5, le=3600)
    """Seconds between updates; the server renews its numbers every ten seconds."""
    once: bool = False
    """Print it once and exit."""


TOP = CommandSpec(
    "top",
    "Shows what a running server is doing: rewards, speed, trainers, engines, failures.",
    TopSettings,
    usage="[URL]",
    arguments=("url",),
)


def run_top(argv: list[str]) -> int:
    with lean_imports():
        from envserver_records.servers import ServersClient
        from rich.live import Live

        from .console import Console
        from .overview import overview_of

    settings = TOP.read(argv)
    console = Console()
    with ServersClient(settings.url, timeout=20.0, headers=authorization()) as http:
        shown = overview_of(http, settings.url).tables()
        if settings.once:
            console.print(shown)
            return 0
        with Live(shown, console=console, auto_refresh=False) as live:
            while True:
                time.sleep(settings.seconds)
                live.update(overview_of(http, settings.url).tables(), refresh=True)
