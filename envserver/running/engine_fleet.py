"""Opens the fleet of a command: engines besides those of `openai.base_url`, and their discovery."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from ..config import Settings
from ..models.discovery import discovering
from ..models.engine import Engine
from ..models.fleet import Fleet
from ..models.openai import OpenAIEngine
from ..proxy.endpoint import EngineEndpoint
from .engine_checks import EngineChecks


@contextlib.asynccontextmanager
async def fleet_of(
    settings: Settings,
    engine: Engine,
    endpoint: EngineEndpoint,
    *,
    need_exact: bool,
) -> AsyncIterator[Fleet]:
    """Opens the fleet of `engine`, and discovers engines as `settings` say."""
    assert isinstance(engine, OpenAIEngine)
    engine.routes.version = lambda: endpoint.policy_version
    endpoint.begun, endpoint.ended = engine.routes.begun, engine.routes.ended
    checks = EngineChecks(engine, settings, endpoint, need_exact=need_exact)
    async with (
        Fleet(engine, checks, checks.confirm) as fleet,
        discovering(fleet, settings.engines),
    ):
        endpoint.confirm = fleet.confirm_home
        yield fleet
