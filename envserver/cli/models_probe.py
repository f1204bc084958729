"""`envserver models probe URL`: shows what an engine supports, as a table or as JSON."""

from __future__ import annotations

import asyncio
import sys

from envserver_records.errors import EngineError

from ..models.openai import OpenAIEngine
from ..models.probe import probe
from ..proxy.endpoint import capabilities_of
from ..telemetry.redaction import printable
from .engine_table import ProbedEngine, differences, print_json, print_table
from .logs import show_logs
from .loop import run_loop
from .specs.models_probe import COMMAND, ProbeSettings

_TRIES = 2


def run(argv: list[str]) -> int:
    """Runs the command; returns 1 if an engine does not answer.

    Args:
        argv: the arguments after `models probe`.
    """
    settings = COMMAND.read(argv)
    show_logs(settings)
    return run_loop(_run(settings))


async def _run(settings: ProbeSettings) -> int:
    urls = settings.openai.base_urls
    outcomes = await asyncio.gather(
        *(_probe(url, settings) for url in urls), return_exceptions=True
    )
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, EngineError):
            raise outcome
    probed = [outcome for outcome in outcomes if isinstance(outcome, ProbedEngine)]
    show = print_json if settings.as_json else print_table
    show(probed, differences(probed))
    for url, outcome in zip(urls, outcomes, strict=True):
        if isinstance(outcome, EngineError):
            print(printable(f"envserver: {url}: {outcome}", keep="\n"), file=sys.stderr)
    return 0 if len(probed) == len(urls) else 1


async def _probe(url: str, settings: ProbeSettings) -> ProbedEngine:
    """Probes one address."""
    config = settings.openai.model_copy(update={"base_url": url})
    async with OpenAIEngine(config, tries=_TRIES) as engine:
        model = await engine.model_name()
        probe_result = await probe(engine, wanted=config.mode, model=model)
    told = config.default_template_kwargs
    capabilities = await asyncio.to_thread(capabilities_of, probe_result, settings.tokens, told)
    return ProbedEngine(
        url=url,
        probe_result=probe_result,
        tokenizer=capabilities.folder,
        template_kwargs=capabilities.format.defaults if capabilities.format else {},
        not_stitched=capabilities.why_not or None,
    )
