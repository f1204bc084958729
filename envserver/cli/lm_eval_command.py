"""`envserver lm-eval TASKS`: runs the harness and prints the report; see `running.lm_eval`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial

from rich.status import Status

from ..running.lm_eval import CountingEngine, lm_eval
from .console import Console
from .evaluate_command import show_report
from .logs import show_logs
from .loop import run_loop
from .specs.lm_eval_command import COMMAND


def run(argv: list[str]) -> int:
    settings = COMMAND.read(argv)
    show_logs(settings)
    console = Console(stderr=True)
    folder, report = run_loop(lm_eval(settings, tell=console.say, watch=partial(_watched, console)))
    show_report(console, report, folder)
    return 0


@contextlib.asynccontextmanager
async def _watched(console: Console, engine: CountingEngine) -> AsyncIterator[None]:
    """Shows a progress line on a terminal; elsewhere nothing."""

    async def tell(status: Status) -> None:
        while True:
            await asyncio.sleep(0.5)
            spent = engine.spent
            tokens = spent.prompt_tokens + spent.completion_tokens
            status.update(f"{spent.requests:,} answers, {tokens:,} tokens")

    if not console.is_terminal:
        yield
        return
    with console.status("Starting the harness") as status:
        telling = asyncio.create_task(tell(status))
        try:
            yield
        finally:
            telling.cancel()
