"""What the alarms of a server know beside its numbers."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from envserver_records.errors import ConfigError
from envserver_records.extras import install_command

from ..server_config import TelemetryConfig
from ..store.demand import Demand
from ..telemetry.alarms import AlarmFacts
from ..telemetry.tracing import NO_TRACER, Tracer

if TYPE_CHECKING:
    from .bootstrap import BootstrapServer
    from .hosting import Hosted


def alarm_facts(server: BootstrapServer, host: Hosted, store: str) -> AlarmFacts:
    """Returns the facts of a server with environments."""
    ranges = {one.environment.name: one.scorer.rules.range for one in host.parts}
    audit = host.auditor.report()
    described = [one.proxy.engine_described() for one in host.parts]
    return msgspec.structs.replace(
        delivery_facts(server, host.demand, store),
        reward_ranges={name: (one.low, one.high) for name, one in ranges.items()},
        last_words=dict(host.tally.last_words),
        differs_at=next((one["differs_at"] for one in described if "differs_at" in one), ""),
        audited=audit["rows"],
        differing=audit["rows_over_tolerance"],
    )


def delivery_facts(server: BootstrapServer, demand: Demand, store: str) -> AlarmFacts:
    """Returns the facts of any server."""
    return AlarmFacts(
        broken={
            name: part.reason
            for name, part in server.health.parts.items()
            if part.state in ("down", "limited")
        },
        groups_wanted=demand.smallest_batch(),
        disk_free_bytes=_free_bytes(store),
    )


def _free_bytes(store: str) -> int | None:
    """Returns the bytes that are left for a file; None for a database elsewhere."""
    if "://" in store:
        return None
    try:
        disk = os.statvfs(Path(store).parent)
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize


@asynccontextmanager
async def tracer_of(config: TelemetryConfig) -> AsyncIterator[Tracer]:
    """Yields a tracer for `config`; without an endpoint it traces nothing and imports nothing.
    Raises ConfigError: the library is not installed.
    """
    if config.otlp_endpoint is None:
        yield NO_TRACER
        return
    try:
        from ..telemetry.otel import otlp_tracer
    except ImportError as error:
        raise ConfigError(
            f"telemetry.otlp_endpoint needs OpenTelemetry: {error}.",
            hint=install_command("otel"),
        ) from error
    async with otlp_tracer(
        config.otlp_endpoint,
        service_name=config.service_name,
        sample_ratio=config.sample_ratio,
        texts=config.otlp_texts,
    ) as tracer:
        yield tracer
