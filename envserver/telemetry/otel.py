"""Sends traces with OpenTelemetry over OTLP/HTTP. Imported only if an endpoint is set."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span as ApiSpan
from opentelemetry.trace import (
    SpanKind,
    Status,
    StatusCode,
    format_span_id,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace import Tracer as ApiTracer

from ..version import __version__
from .tracing import Attributes, Span, Tracer

_NANOSECONDS = 1_000_000_000
_SEND_SECONDS = 5
"""Timeout of one batch, retries included; the longest delay at shutdown if the receiver is gone."""


@asynccontextmanager
async def otlp_tracer(
    endpoint: str, *, service_name: str, sample_ratio: float, texts: bool = False
) -> AsyncIterator[OtelTracer]:
    """Sends traces to `endpoint` (`http://host:4318`) in the background; flushes on exit."""
    provider = TracerProvider(
        resource=Resource.create({"service.name": service_name, "service.version": __version__}),
        sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
    )
    exporter = OTLPSpanExporter(_address(endpoint), timeout=_SEND_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield OtelTracer(provider.get_tracer("envserver", __version__), texts)
    finally:
        await asyncio.to_thread(provider.shutdown)


def _address(endpoint: str) -> str:
    address = endpoint.rstrip("/")
    return address if address.endswith("/v1/traces") else f"{address}/v1/traces"


class OtelTracer(Tracer):
    def __init__(self, tracer: ApiTracer, texts: bool) -> None:
        self._tracer = tracer
        self._texts = texts

    @contextmanager
    def trace(self, name: str, attributes: Attributes) -> Iterator[Span]:
        with _open(self._tracer, name, attributes, None, SpanKind.INTERNAL) as span:
            yield _OtelSpan(self._tracer, span, self._texts)


class _OtelSpan(Span):
    def __init__(self, tracer: ApiTracer, span: ApiSpan, texts: bool) -> None:
        self._tracer = tracer
        self._span = span
        self.texts = texts
        of = span.get_span_context()
        ids = f"{format_trace_id(of.trace_id)}-{format_span_id(of.span_id)}"
        self.traceparent = f"00-{ids}-{int(of.trace_flags):02x}"

    @contextmanager
    def child(self, name: str, attributes: Attributes, *, client: bool = False) -> Iterator[Span]:
        kind = SpanKind.CLIENT if client else SpanKind.INTERNAL
        with _open(self._tracer, name, attributes, self._span, kind) as span:
            yield _OtelSpan(self._tracer, span, self.texts)

    def note(self, attributes: Attributes) -> None:
        self._span.set_attributes(dict(attributes))

    def past(self, name: str, attributes: Attributes, started_at: float, ended_at: float) -> None:
        span = self._tracer.start_span(
            name,
            context=set_span_in_context(self._span),
            attributes=dict(attributes),
            start_time=int(started_at * _NANOSECONDS),
        )
        span.end(int(ended_at * _NANOSECONDS))


@contextmanager
def _open(
    tracer: ApiTracer,
    name: str,
    attributes: Attributes,
    parent: ApiSpan | None,
    kind: SpanKind,
) -> Iterator[ApiSpan]:
    # An error's message may hold an answer or an address: only its kind is recorded.
    context = None if parent is None else set_span_in_context(parent)
    span = tracer.start_span(name, context=context, kind=kind, attributes=dict(attributes))
    try:
        yield span
    except BaseException as error:
        span.set_attribute("error.type", getattr(error, "kind", type(error).__name__))
        span.set_status(Status(StatusCode.ERROR))
        raise
    finally:
        span.end()
