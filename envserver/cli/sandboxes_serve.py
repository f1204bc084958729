"""`envserver sandboxes serve`: makes sandboxes for servers elsewhere; see `running.sandboxes`."""

from __future__ import annotations

import asyncio
import signal
import sys

from ..running.run_settings import SandboxesServeSettings
from ..running.sandbox_serving import sandbox_serving
from .logs import show_logs
from .loop import run_loop
from .specs.sandboxes_serve import COMMAND


def run(argv: list[str]) -> int:
    settings = COMMAND.read(argv)
    show_logs(settings)
    return run_loop(serve_sandboxes(settings))


async def serve_sandboxes(settings: SandboxesServeSettings) -> int:
    """Serves until SIGINT or SIGTERM; returns 1 if open sandboxes were ended, else 0."""
    stop, at_once = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (at_once if stop.is_set() else stop).set()

    async with sandbox_serving(settings) as served:
        # Not before: a signal ends a start.
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
        load = served.machine.load
        _say(
            f"Sandboxes ({load.backend}, {load.sandboxes} at a time, {load.room} programs at a "
            f"time): --sandbox.remote {served.url}"
        )
        await stop.wait()
        left = served.machine.load.open
        if left:
            _say(f"Waiting until {left} open sandboxes are closed; again stops at once.")
        draining = asyncio.create_task(served.drain())
        ending = asyncio.create_task(at_once.wait())
        await asyncio.wait(
            {draining, ending},
            timeout=settings.server.drain_seconds,
            return_when=asyncio.FIRST_COMPLETED,
        )
        ending.cancel()
        draining.cancel()
        return 1 if served.machine.load.open else 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
