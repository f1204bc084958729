"""Opens the judge that `--judge.*` names, and says what it cost."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from envserver_records.costs import Prices

from ..judges.server import JudgeServer
from ..settings.config import OpenAIConfig
from ..settings.runs import JudgeConfig
from ..telemetry.measures import Reading
from ..telemetry.redaction import counted

CACHE_NAME = "judge.db"
_SCORERS = 8
"""Scorer processes with a judge, at least: each waits while it is asked."""


@contextlib.asynccontextmanager
async def judge_of(config: JudgeConfig, folder: Path) -> AsyncIterator[JudgeServer | None]:
    if config.base_url is None:
        yield None
        return
    from ..models.openai import OpenAIEngine

    engine = OpenAIEngine(
        OpenAIConfig(
            base_url=config.base_url,
            model_name=config.model_name,
            api_key=config.api_key,
            timeout=config.timeout,
            num_max_requests_at_once=config.max_concurrent,
            server_type="openai",
        )
    )
    async with engine, JudgeServer(engine, config, config.cache or folder / CACHE_NAME) as judge:
        yield judge


def folder_of(place: str) -> Path:
    """`data` for a database on another machine."""
    return Path("data") if "://" in place else Path(place).parent


def beside_source(sources: Sequence[str], otherwise: Path) -> Path:
    """Returns the folder of the first source, where `process` or `serve` had the judge's cache."""
    first = Path(sources[0])
    if first.is_dir():
        return first
    return first.parent if first.exists() else otherwise


def scorer_processes(wanted: int, config: JudgeConfig) -> int:
    if config.base_url is None:
        return wanted
    return max(wanted, min(_SCORERS, config.max_concurrent))


def judge_line(judge: JudgeServer) -> str:
    counts = judge.counts
    parts = [
        f"Judge: {counted(counts.calls, 'call')} ({counts.cached} from {judge.cache_path}"
        + (f", {counts.again} repeated" if counts.again else "")
        + (f", {counts.failed} failed" if counts.failed else "")
        + ")",
        f"{counts.prompt_tokens:,} prompt + {counts.completion_tokens:,} completion tokens",
    ]
    if (cost := _cost(judge)) is not None:
        parts.append(f"{cost:.4f} {judge.config.currency}")
    return ", ".join(parts)


async def judge_numbers(judge: JudgeServer | None) -> Reading:
    if judge is None:
        return {f"judge_{name}": {} for name in ("calls", "again", "tokens", "cost")}
    counts, cost = judge.counts, _cost(judge)
    engine = counts.calls - counts.cached
    return {
        "judge_calls": {"engine": engine, "cache": counts.cached, "failed": counts.failed},
        "judge_again": counts.again,
        "judge_tokens": {"prompt": counts.prompt_tokens, "completion": counts.completion_tokens},
        "judge_cost": {} if cost is None else {judge.config.currency: cost},
    }


def prices_of(
    prompt: float | None, completion: float | None, currency: str, source: str
) -> Prices | None:
    """None unless both prices are known."""
    if prompt is None or completion is None:
        return None
    return Prices(prompt=prompt, completion=completion, currency=currency, source=source)


def judge_prices(config: JudgeConfig) -> Prices | None:
    prices = config.prompt_price, config.completion_price
    return prices_of(*prices, config.currency, "--judge.prompt_price")


def _cost(judge: JudgeServer) -> float | None:
    prices, counts = judge_prices(judge.config), judge.counts
    if prices is None:
        return None
    return prices.cost(counts.prompt_tokens, counts.completion_tokens)
