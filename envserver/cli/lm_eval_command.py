"""`envserver lm-eval TASKS`: runs the harness and prints the report; the work is in
`running.lm_eval`."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from envserver_records.errors import ConfigError, UsageError
from rich.console import Console
from rich.status import Status

from ..config import OpenAIConfig
from ..evaluation.folders import View
from ..evaluation.report import Counted
from ..models.engine import Engine
from ..running.engines import SIMULATED, look_at, started
from ..running.evaluation_folder import write_report
from ..running.lm_eval import (
    CountingEngine,
    Order,
    check_installed,
    fold_in,
    run_harness,
    this_python,
)
from ..running.prices import pricing_of
from .evaluate_command import show_report
from .logs import configure_logs
from .loop import run_loop
from .specs.lm_eval_command import COMMAND, LmEvalSettings


def run(argv: list[str]) -> int:
    """Runs the command.

    Raises:
        UsageError: a setting is wrong, the harness is not installed, or failed.
        EngineError: the engine does not answer.
    """
    settings = COMMAND.read(argv)
    configure_logs(settings.log_level, settings.log_format)
    run_loop(_lm_eval(settings, Console(stderr=True)))
    return 0


async def _lm_eval(settings: LmEvalSettings, console: Console) -> None:
    if not settings.tasks:
        raise UsageError("Which tasks? For example: envserver lm-eval gsm8k --limit 100.")
    folder = settings.out or Path("runs") / "lm-eval" / time.strftime("%Y%m%d-%H%M%S")
    order = _order(settings, folder)
    await asyncio.to_thread(_check_folder, order, settings)
    await check_installed(order.python)

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    pricing = pricing_of(settings.prices, settings.model, settings.engine.models_file)
    async with _engine(settings) as engine:
        view = View(pass_at=settings.pass_at, pricing=pricing)
        order = replace(order, counted=view.over(Counted(), await engine.model_name()))
        async with _watched(console, engine):
            simulated = settings.model == SIMULATED
            tasks = await run_harness(order, engine, simulated=simulated, tell=say)
    fold_in(folder, tasks)
    show_report(console, write_report(folder, View()), folder)


def _order(settings: LmEvalSettings, folder: Path) -> Order:
    return Order(
        tasks=settings.tasks,
        folder=folder,
        python=settings.python or this_python(),
        api=settings.api,
        num_fewshot=settings.num_fewshot,
        limit=settings.limit,
        include_path=settings.include_path,
        gen_kwargs=settings.gen_kwargs,
        system_instruction=settings.system_instruction,
        tokenizer=settings.tokenizer,
        concurrency=settings.concurrency,
        metric=settings.metric,
        more=settings.args,
    )


def _check_folder(order: Order, settings: LmEvalSettings) -> None:
    """Checks that no task is run twice by mistake.

    Raises:
        ConfigError: the folder already has these tasks.
    """
    if settings.resume and settings.overwrite:
        raise ConfigError("--resume and --overwrite exclude each other.")
    if order.harness.exists() and not (settings.resume or settings.overwrite):
        raise ConfigError(
            f"{order.folder} already has {', '.join(order.tasks)}.",
            hint="Use --resume to continue, or --overwrite to run them again.",
        )
    if settings.overwrite:
        shutil.rmtree(order.harness, ignore_errors=True)


@contextlib.asynccontextmanager
async def _engine(settings: LmEvalSettings) -> AsyncIterator[CountingEngine]:
    async with contextlib.AsyncExitStack() as stack:
        openai = await stack.enter_async_context(
            started(settings.model, settings.openai, settings.engine)
        )
        engine = CountingEngine(_made(settings, openai))
        await stack.enter_async_context(engine)
        await look_at(engine, must_answer=True)
        yield engine


def _made(settings: LmEvalSettings, openai: OpenAIConfig) -> Engine:
    if settings.model == SIMULATED:
        from ..models.sim import SimEngine

        return SimEngine(settings.sim)
    from ..models.openai import OpenAIEngine

    return OpenAIEngine(openai)


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
