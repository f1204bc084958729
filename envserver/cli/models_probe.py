"""`envserver models probe URL`: how an engine can be asked, for people or as JSON."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from envserver_records.errors import EngineError
from pydantic import Field, model_validator

from ..config import LogLevel, OpenAIConfig, Section, TokensConfig
from ..models.openai import OpenAIEngine
from ..models.probe import probe
from ..proxy.capabilities import capabilities_of
from .command_line import CommandSpec
from .engine_table import ProbedEngine, differences, print_json, print_table
from .logs import configure_logs
from .loop import run_loop

SUMMARY = """Asks an engine about a dozen tiny things and shows what it can do: how exactly its
tokens can be recorded, what is missing, and what to do about it. Several addresses (separated by
commas) are probed one by one; where they differ is shown."""

_TRIES = 2


class ProbeSettings(Section):
    """The settings that `models probe` has."""

    url: list[str] = Field(default_factory=list)
    """Addresses of engines, `http://` may be left out; unset: those of openai.base_url."""
    log_level: LogLevel = "error"
    """Least serious event that is logged."""
    as_json: bool = Field(default=False)
    """JSON, not a table."""
    openai: OpenAIConfig = OpenAIConfig()
    tokens: TokensConfig = TokensConfig()

    @model_validator(mode="before")
    @classmethod
    def _addresses(cls, values: dict[str, Any]) -> dict[str, Any]:
        urls = [url.strip() for url in ",".join(values.get("url") or []).split(",") if url.strip()]
        if not urls:
            return values
        whole = [url if "://" in url else f"http://{url}" for url in urls]
        return {**values, "openai": {**values.get("openai", {}), "base_url": whole}}


COMMAND = CommandSpec("models probe", SUMMARY, ProbeSettings, usage="URL...", arguments=("url",))


def run(argv: list[str]) -> int:
    """The command; its status is 1 where an engine does not answer.

    Args:
        argv: the words after `models probe`.

    Raises:
        ConfigError: a setting is wrong, or an engine cannot be asked as `openai.mode` wants.
    """
    settings = COMMAND.read(argv)
    if settings is None:
        return 0
    configure_logs(settings.log_level)
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
            print(f"envserver: {url}: {outcome}", file=sys.stderr)
    return 0 if len(probed) == len(urls) else 1


async def _probe(url: str, settings: ProbeSettings) -> ProbedEngine:
    """Asks one address.

    Raises:
        EngineError: it does not answer, or refuses us.
        ConfigError: the wanted mode is not possible, or `tokens.tokenizer` lacks something.
    """
    config = settings.openai.model_copy(update={"base_url": url})
    async with OpenAIEngine(config, tries=_TRIES) as engine:
        model = await engine.model_name()
        probe_result = await probe(engine, wanted=config.mode, model=model)
    capabilities = await asyncio.to_thread(capabilities_of, probe_result, settings.tokens)
    return ProbedEngine(
        url=url,
        probe_result=probe_result,
        tokenizer=capabilities.folder,
        not_stitched=capabilities.why_not or None,
    )
