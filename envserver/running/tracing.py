"""Makes the tracer of a command."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from envserver_records.errors import ConfigError
from envserver_records.extras import install_command

from ..settings.server import TelemetryConfig
from ..telemetry.tracing import NO_TRACER, Tracer


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
