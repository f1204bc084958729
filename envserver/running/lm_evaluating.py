"""The work of `envserver lm-eval`: runs tasks of lm-evaluation-harness and writes their report.

In: settings. Out: a folder that `evaluate report` and `evaluate compare` read. What holds: a task
that the folder has is not run again by mistake.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

from envserver_records.errors import ConfigError, UsageError

from ..config import OpenAIConfig
from ..evaluation.folders import View
from ..evaluation.report import Counted, Report
from ..evaluation.suite import Suite
from ..models.engine import Engine
from .engines import SIMULATED, look_at, started
from .evaluation_folder import write_report
from .lm_eval import CountingEngine, Order, check_installed, fold_in, run_harness, this_python
from .prices import pricing_of
from .run_settings import LmEvalSettings

Watch = Callable[[CountingEngine], AbstractAsyncContextManager[None]]
"""Makes a context that is open while the harness runs; the engine has the counts so far."""


async def lm_eval(
    settings: LmEvalSettings, *, tell: Callable[[str], object], watch: Watch
) -> tuple[Path, Report | Suite]:
    """Runs the tasks; returns the folder and its report.

    Args:
        tell: called with each line that the user should see.

    Raises:
        UsageError: a setting is wrong, the harness is not installed, or failed.
        EngineError: the engine does not answer.
    """
    if not settings.tasks:
        raise UsageError("Which tasks? For example: envserver lm-eval gsm8k --limit 100.")
    folder = settings.out or Path("runs") / "lm-eval" / time.strftime("%Y%m%d-%H%M%S")
    order = _order(settings, folder)
    await asyncio.to_thread(_check_folder, order, settings)
    await check_installed(order.python)
    pricing = pricing_of(settings.prices, settings.model, settings.engine.models_file)
    async with _engine(settings) as engine:
        view = View(pass_at=settings.pass_at, pricing=pricing)
        order = replace(order, counted=view.over(Counted(), await engine.model_name()))
        if settings.overwrite:  # not before the engine answers
            await asyncio.to_thread(shutil.rmtree, order.harness, ignore_errors=True)
        async with watch(engine):
            simulated = settings.model == SIMULATED
            tasks = await run_harness(order, engine, simulated=simulated, tell=tell)
    fold_in(folder, tasks)
    return folder, write_report(folder, View())


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
    """Checks that no task is run twice by mistake."""
    if settings.resume and settings.overwrite:
        raise ConfigError("--resume and --overwrite exclude each other.")
    if order.harness.exists() and not (settings.resume or settings.overwrite):
        raise ConfigError(
            f"{order.folder} already has {', '.join(order.tasks)}.",
            hint="Use --resume to continue, or --overwrite to run them again.",
        )


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
