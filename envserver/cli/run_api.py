"""`envserver run-api`: serves the trainer API without an environment; the work is in
`running.api_serving`."""

from __future__ import annotations

import asyncio
import signal
import sys

from ..running.api_serving import api_serving
from ..running.run_settings import RunApiSettings
from .logs import show_logs
from .loop import run_loop
from .specs.run_api import COMMAND


def run(argv: list[str]) -> int:
    settings = COMMAND.read(argv)
    show_logs(settings)
    return run_loop(run_api(settings))


async def run_api(settings: RunApiSettings) -> int:
    """Serves until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    async with api_serving(settings) as url:
        # Not before: a signal ends a start, which may wait for its database.
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        print(f"Trainers and environments: {url}", file=sys.stderr, flush=True)
        await stop.wait()
    return 0
