"""`envserver view`: the page over what is on disk; the work is in `running.viewing`."""

from __future__ import annotations

import asyncio
import signal
import webbrowser

from envserver_records.errors import UsageError

from ..running.viewing import viewing
from .console import Console
from .logs import show_logs
from .loop import run_loop
from .specs.view_command import COMMAND, ViewSettings

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(argv: list[str]) -> int:
    """Serves the page until Ctrl-C or SIGTERM."""
    settings = COMMAND.read(argv)
    if not settings.source:
        raise UsageError("`envserver view` needs something to show.", hint="Give a file.")
    show_logs(settings)
    return run_loop(_view(settings))


async def _view(settings: ViewSettings) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with viewing(settings.source, host=settings.host, port=settings.port) as found:
        for number in _SIGNALS:
            loop.add_signal_handler(number, stop.set)
        console = Console(highlight=False, soft_wrap=True)
        console.print(f"{found.title}: {found.url}/", markup=False)
        if settings.open:
            await asyncio.to_thread(webbrowser.open, f"{found.url}/")
        await stop.wait()
        for number in _SIGNALS:  # a second one does not wait for what is being read
            loop.remove_signal_handler(number)
    return 0
