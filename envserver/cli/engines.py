"""The engine that the settings name, and how it is asked."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

import structlog

from ..config import Settings
from ..errors import ConfigError, EngineError
from ..models.engine import Engine
from ..models.upstream import probe
from ..proxy.gate import Gate
from ..proxy.source import VERSION_PLACE, Source
from ..proxy.ways import Ways, ways_of
from ..rollouts.group import Demonstrator

SIMULATED = "sim"

_log = structlog.get_logger("envserver.engine")


def make_engine(settings: Settings) -> tuple[Engine, Demonstrator | None]:
    """The engine that `settings` name, and who is told the solutions (only the simulated one).

    Raises:
        ConfigError: `model` names no engine.
    """
    if settings.model is None:
        from ..models.openai import OpenAIEngine

        return OpenAIEngine(settings.openai), None
    if settings.model == SIMULATED:
        from ..models.sim import RolloutSolver, SimEngine

        solver = RolloutSolver()
        return SimEngine(settings.sim, solver), solver
    raise ConfigError(
        f"There is no built-in model {settings.model!r}.",
        hint="Use --model sim, or name a server with --openai.base_url and --openai.model_name.",
    )


def make_source(
    settings: Settings,
    engine: Engine,
    *,
    model: str = "",
    is_elsewhere: bool = False,
    gate: Gate | None = None,
) -> Source:
    """How `engine`, which need not answer yet, is asked: found out at the first call.

    The simulated engine and those that give text only are asked through their chat API.

    Args:
        model: the name to ask for, where it is not the engine's own.
        is_elsewhere: it is not the rollouts' engine: what is set for that does not hold for it.
        gate: of the engine, where it has a source already.
    """
    tokens = settings.tokens.model_copy(update={"tokenizer": None}) if model else settings.tokens
    if engine.kind == SIMULATED or not engine.exact:
        return Source(engine, tokens=tokens, gate=gate)

    async def find() -> Ways:
        name = model or await engine.model_name()
        asked = await _any_model(engine) if VERSION_PLACE in name else name
        mode = "auto" if is_elsewhere else settings.openai.mode
        upstream = await probe(engine, wanted=mode, model=asked)
        ways = await asyncio.to_thread(ways_of, upstream, tokens)
        _say(ways)
        return ways

    return Source(engine, find=find, tokens=tokens, gate=gate)


async def look_at(engine: Engine, *, must_answer: bool) -> bool:
    """Finds out now, not after many failed rollouts, that there is no engine at its address.

    An engine that does not list its models (HTTP 404) may still answer calls.

    Returns:
        Whether it answers.

    Raises:
        EngineError: it must answer, and does not, or refuses our key.
    """
    replicas = await engine.health()
    for replica in replicas:
        if not replica.healthy:
            _log.warning("engine_does_not_answer", base_url=replica.base_url, reason=replica.reason)
    answers = any(replica.healthy for replica in replicas)
    if must_answer and not answers:
        try:
            await engine.get("/v1/models")
        except EngineError as error:
            if error.detail.get("status") != HTTPStatus.NOT_FOUND:
                raise
    return answers or must_answer


async def _any_model(engine: Engine) -> str:
    """One of the models that are served: all of one engine are asked in the same way."""
    listed = await engine.get("/v1/models")
    names = [card.get("id") for card in listed.get("data") or () if isinstance(card, dict)]
    if not names or not isinstance(names[0], str):
        raise EngineError("The engine lists no model.")
    return names[0]


def _say(ways: Ways) -> None:
    upstream = ways.upstream
    facts = {"server": upstream.server or "unknown", "mode": upstream.mode}
    if ways.format is not None:
        _log.info("engine_found", **facts, tokenizer=str(ways.folder))
    else:
        _log.info("engine_found", **facts, not_continued=ways.why_not)
