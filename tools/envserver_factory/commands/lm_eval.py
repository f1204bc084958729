"""`envserver lm-eval`: tasks of lm-evaluation-harness on a model."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING

from envserver.cli import lean_imports
from envserver.cli.command_line import ENGINE, CommandSpec

from ..run_settings import LmEvalSettings

if TYPE_CHECKING:
    from rich.status import Status

    from envserver.cli.console import Console

    from ..lm_eval import CountingEngine


_SUMMARY = """Runs tasks of lm-evaluation-harness (gsm8k, aime24, ifeval ...) against an engine
and writes the results in the format of `evaluate`: a report with intervals that `evaluate
compare` can read. In the folder of an evaluation (--out) they become part of its report. The
harness downloads the data of its tasks itself; it is the extra `lm-eval`."""

COMMAND = CommandSpec(
    "lm-eval",
    _SUMMARY,
    LmEvalSettings,
    usage="TASKS",
    arguments=("tasks",),
    frequent=(
        *("tasks", *ENGINE, "out", "resume", "overwrite", "api", "tokenizer", "num_fewshot"),
        *("limit", "concurrency", "metric", "pass_at"),
    ),
    openai_variables="openai",
)


def run(argv: list[str]) -> int:
    with lean_imports():
        from envserver.cli.console import Console
        from envserver.cli.evaluating import show_report
        from envserver.cli.loop import run_loop, show_logs

        from ..lm_eval import lm_eval

    settings = COMMAND.read(argv)
    show_logs(settings)
    console = Console(stderr=True)
    folder, report = run_loop(lm_eval(settings, tell=console.say, watch=partial(_watched, console)))
    show_report(console, report, folder)
    return 0


@contextlib.asynccontextmanager
async def _watched(console: Console, engine: CountingEngine) -> AsyncIterator[None]:
    import asyncio

    async def update(status: Status) -> None:
        while True:
            await asyncio.sleep(0.5)
            spent = engine.spent
            tokens = spent.prompt_tokens + spent.completion_tokens
            status.update(f"{spent.requests:,} answers, {tokens:,} tokens")

    if not console.is_terminal:
        yield
        return
    with console.status("Starting the harness") as status:
        updating = asyncio.create_task(update(status))
        try:
            yield
        finally:
            updating.cancel()
