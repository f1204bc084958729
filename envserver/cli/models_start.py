"""`envserver models start NAME`: starts an engine for a model and supervises it until stopped."""

from __future__ import annotations

import sys

from envserver_records.errors import UsageError

from ..models.catalogue import find_model, read_catalogue
from ..models.manager import engine_spec, running_engine
from .logs import show_logs
from .loop import run_loop
from .specs.models_start import COMMAND, StartSettings

PORT = 9001


def run(argv: list[str]) -> int:
    """Runs the command until a signal, or until the engine has died too often.

    Args:
        argv: the arguments after `models start`.
    """
    settings = COMMAND.read(argv, defaults={"engine": {"port": PORT}})
    if not settings.name:
        raise UsageError(
            "Give a model: envserver models start NAME",
            hint="`envserver models list` shows the names.",
        )
    show_logs(settings)
    run_loop(_start(settings))
    return 0


async def _start(settings: StartSettings) -> None:
    config = settings.engine
    entry = find_model(settings.name, read_catalogue(config.models_file), config.models_file)
    async with running_engine(engine_spec(entry, config), tell=_say) as engine:
        print(engine.base_url, flush=True)
        await engine.until_lost()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
